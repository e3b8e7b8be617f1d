"""In which order a generator's groups begin, and what it reports of them."""

from collections.abc import Sequence

import pytest

from actors.engines.weight_targets import WeightTarget
from actors.leased_group import num_free_groups
from actors.version_gate import VersionGate
from buffers.memory import MemoryBuffer
from streamrl.config.generator import GeneratorSettings
from streamrl.types import MAX_NAMES, replace
from tests.unit.test_generator import Run, update


def leasing_in_reverse(monkeypatch: pytest.MonkeyPatch, min_policy_versions: Sequence[int]) -> None:
    """Leases come last one first; that of prompt i has the i-th version."""
    lease = MemoryBuffer.lease

    async def reversed_lease(buffer, lease_ids, generator_id, wait_s, learner_id):
        leases = await lease(buffer, lease_ids, generator_id, wait_s, learner_id)
        versions = [min_policy_versions[lease.prompt_index] for lease in leases]
        pairs = zip(leases, versions, strict=True)
        return [replace(lease, min_policy_version=version) for lease, version in pairs][::-1]

    monkeypatch.setattr(MemoryBuffer, "lease", reversed_lease)


async def test_groups_begin_in_the_order_in_which_they_are_due(monkeypatch):
    run = Run()
    run.engine.open.clear()
    run.engine.policy_version = 2
    leasing_in_reverse(monkeypatch, [2, 2, 1, 1])
    await run.learner.attach(2, None)
    async with run.generating():
        await run.until(lambda: run.engine.num_running == 8)
        run.engine.open.set()
    assert run.engine.begun == [3, 3, 4, 4, 1, 1, 2, 2]


async def test_groups_that_wait_for_a_version_begin_in_the_order_in_which_they_are_due(monkeypatch):
    run = Run()
    run.engine.open.clear()
    leasing_in_reverse(monkeypatch, [2, 2, 1, 0])
    monkeypatch.setattr(VersionGate, "is_open", lambda gate, version, learner_id: True)
    await run.learner.attach(2, None)
    async with run.generating() as generator:
        await run.until(lambda: len(run.engine.begun) == 2)
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(1))
        await run.until(lambda: len(run.engine.begun) == 4)
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(2))
        await run.until(lambda: len(run.engine.begun) == 8)
        run.engine.open.set()
    assert run.engine.begun == [4, 4, 3, 3, 1, 1, 2, 2]


async def test_heartbeats_report_the_tokens_of_each_groups_longest_sibling():
    run = Run()
    run.engine.open.clear()
    run.engine.at_stop = 17
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(
            lambda: any(s.lease_num_tokens == (17,) * 4 for s in run.state.registry.statuses)
        )
        run.engine.open.set()


def test_a_generator_with_any_room_holds_no_more_leases_than_a_message_names():
    """Else the buffer would refuse its calls, and it would end."""
    settings = GeneratorSettings(max_num_seqs=10 * MAX_NAMES)
    assert num_free_groups((), settings, 1) == MAX_NAMES
