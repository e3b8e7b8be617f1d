"""What an update does to requests in flight, by `generator.sglang.pause_mode`, on a real SGLang."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from actors.engines.served.engine import ServedEngine
from streamrl.errors import TransportError
from streamrl.types import Completion, SamplingParams
from streamrl.weights.transports.groups import BroadcastGroup
from tests.engines import logprob_errors, make_model, update_to
from tests.sglang.conftest import SglangServer

pytestmark = pytest.mark.asyncio(loop_scope="session")
GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=600, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], [20, 21]]


@pytest_asyncio.fixture(loop_scope="session")
async def engine(
    server: SglangServer, request: pytest.FixtureRequest
) -> AsyncIterator[ServedEngine]:
    opened = server.open(**getattr(request, "param", {}))
    yield opened
    await opened.close()


async def until_running(engine: ServedEngine, count: int) -> None:
    async with asyncio.timeout(120):
        while engine.gauges()["num_active"] < count:
            await asyncio.sleep(0.001)


async def update_in_mid_generation(engine: ServedEngine, path: Path) -> list[Completion]:
    """Completions of PROMPTS that were running when seed 1 replaced seed 0 as version 1."""
    update = update_to(make_model(seed=1), 1, path / "one.safetensors")
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    await until_running(engine, 3)
    await engine.load_weights(update)
    completions = await asyncio.gather(*running)
    assert {len(completion.token_ids) for completion in completions} == {600}
    return completions


async def test_by_default_all_is_as_if_the_new_weights_had_read_it(engine, tmp_path):
    completions = await update_in_mid_generation(engine, tmp_path)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        old = completion.policy_versions == 0
        assert 0 < old.sum() < 600
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        assert logprob_errors(1, prompt, completion)[~old].max() < 1e-4


@pytest.mark.parametrize("engine", [{"recompute_kv": False}], indirect=True)
async def test_without_recompute_kv_versions_are_exact_and_the_old_cache_stays(engine, tmp_path):
    completions = await update_in_mid_generation(engine, tmp_path)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        old = completion.policy_versions == 0
        assert 0 < old.sum() < 600
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        # The new weights sampled it, after what the old ones had computed.
        first_new = logprob_errors(0, prompt, completion)[~old][0]
        assert first_new > 1e-3, "the last token of the old weights has the new version"
        assert logprob_errors(1, prompt, completion)[~old].max() > 1e-2


@pytest.mark.parametrize("engine", [{"recompute_kv": False}], indirect=True)
async def test_without_recompute_kv_nobody_else_gets_the_old_cache(engine, tmp_path):
    """Of one long prompt: cached, sampling, waiting and yet to come at the update."""
    prompt, short = ([5, 6, 7, 8, 9] * 60)[:290], SamplingParams(max_new_tokens=8, ignore_eos=True)
    await engine.generate(prompt, short)
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for _ in range(4)]
    await until_running(engine, 4)
    waiting = [asyncio.create_task(engine.generate(prompt, short)) for _ in range(4)]
    # To the server, whose queue they reach while the four are sampled.
    engine._slots.release(), engine._slots.release()
    async with asyncio.timeout(120):
        while (await engine._server.readings())["num_waiting"] < 2:
            await asyncio.sleep(0.001)
    await engine.load_weights(update_to(make_model(seed=1), 1, tmp_path / "one.safetensors"))
    waiting.append(asyncio.create_task(engine.generate(prompt, short)))
    for completion in await asyncio.gather(*waiting):
        assert set(completion.policy_versions.tolist()) == {1}
        assert logprob_errors(1, prompt, completion).max() < 1e-4
    turn = [*prompt, *(await running[0]).token_ids.tolist()]
    assert logprob_errors(1, turn, await engine.generate(turn, short)).max() < 1e-4
    await asyncio.gather(*running)


@pytest.mark.parametrize("engine", [{"pause_mode": "abort"}], indirect=True)
async def test_abort_begins_anew(engine, tmp_path):
    completions = await update_in_mid_generation(engine, tmp_path)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert set(completion.policy_versions.tolist()) == {1}
        assert logprob_errors(1, prompt, completion).max() < 1e-4


async def test_a_new_engine_has_the_first_weights_whatever_another_one_left(server, tmp_path):
    engine = server.open()
    first = await engine.generate([9], GREEDY)
    await engine.load_weights(update_to(make_model(seed=1), 1, tmp_path / "one.safetensors"))
    updated = await engine.generate([9], GREEDY)
    assert updated.token_ids.tolist() != first.token_ids.tolist()
    # As a generator leaves it that dies inside an update.
    await engine._server.http.send("/pause_generation", {"mode": "in_place"})
    await engine._server.http.send("/begin_weight_update", {})
    await engine.close()
    engine = server.open()
    again = await engine.generate([9], GREEDY)
    assert engine.policy_version == 0
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert set(again.policy_versions.tolist()) == {0}
    await engine.close()


@pytest.mark.parametrize("last", ["/update_weights_from_distributed", "/end_weight_update"])
async def test_a_server_whose_owner_ends_inside_a_pause_samples_again(
    server, tmp_path, monkeypatch, last
):
    """The next owner is sent the same version."""
    update = update_to(make_model(seed=1), 3, tmp_path / "three.safetensors")
    killed = server.open(is_shared=True)
    http = killed._server.http
    send = http.send

    async def until_last(path: str, body: Any, **options: Any) -> None:
        await send(path, body, **options)
        if path == last:
            raise asyncio.CancelledError

    monkeypatch.setattr(http, "send", until_last)
    with pytest.raises(asyncio.CancelledError):
        await killed.load_weights(update)
    await killed.close()

    successor = server.open(is_shared=True)
    await successor.load_weights(update)
    async with asyncio.timeout(120):
        answer = await successor.generate([9], GREEDY)
    assert set(answer.policy_versions.tolist()) == {3}
    assert logprob_errors(1, [9], answer).max() < 1e-4
    await successor.close()


async def test_a_refused_bucket_ends_the_engine_and_nobody_waits(engine, tmp_path, monkeypatch):
    """SGLang takes buckets only within a session; the sender is at its broadcast by then."""
    relay = engine._server.updates
    send = relay._http.send

    async def without_session(path: str, body: Any, **options: Any) -> None:
        if path != "/begin_weight_update":
            await send(path, body, **options)

    broadcast, under_way = BroadcastGroup.broadcast, []

    def observed(group: BroadcastGroup, tensor: torch.Tensor) -> None:
        under_way.append(tensor)
        try:
            broadcast(group, tensor)
        finally:
            under_way.pop()

    monkeypatch.setattr(BroadcastGroup, "broadcast", observed)
    monkeypatch.setattr(relay._http, "send", without_session)
    monkeypatch.setattr(relay, "_timeout_s", 1000.0)
    update = update_to(make_model(seed=1), 1, tmp_path / "one.safetensors")
    async with asyncio.timeout(120):
        with pytest.raises(TransportError, match="must run between begin_weight_update"):
            await engine.load_weights(update)
    assert not under_way, "a thread waits for the group's timeout"
