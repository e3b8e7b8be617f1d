"""A real run whose learner is killed is replayed bit for bit, by the commands of the documents."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from learners.replay import MEASURES
from learners.step_record import recorded_steps
from streamrl.cli.buffer.audit import audit_run
from tests.system.conftest import Launched, allow_groups, held_reward
from tests.system.test_docs import RUN_BY
from tests.system.test_launch import output_of

Launch = Callable[..., Launched]


def commands() -> tuple[str, ...]:
    return tuple(c for c, runs_it in RUN_BY.items() if runs_it == Path(__file__).name)


@pytest.mark.long
def test_a_run_whose_learner_was_killed_is_replayed_bit_for_bit(launch: Launch, tmp_path: Path):
    start, same, other = commands()
    # Five steps at least, and eight at most, before the learner is killed.
    reward = f"--set=data.reward={held_reward(tmp_path, num_groups=8 * 4)}"
    settings = ("--set=learner.checkpoint.keep=9", reward)
    run = launch("--new", *settings, *start.partition("--new")[2].split(), strict=False)
    run.until_step(5)
    run.kill("learner")
    allow_groups(tmp_path, 1000)
    assert run.end() == 0, run.output
    assert [line["step"] for line in run.lines] == list(range(1, 13))
    assert sorted(recorded_steps(run.folder)) == list(range(1, 13))
    assert audit_run(run.folder).faults == ()
    output = replay(same, run.folder)
    assert "the same weights, bit for bit, as the checkpoints at version 3, 6, 9, 12" in output
    replay(f"{other} --out {tmp_path / 'other'}", run.folder)
    report = json.loads((tmp_path / "other" / "replay.json").read_text())
    assert {c["largest_difference"] for c in report["checkpoints"]} == {0.0}
    cosines = [step["cosine"] for step in report["steps"]]
    assert len(cosines) == 12
    # Weights that went another way for some steps may be updated in any direction.
    assert max(map(abs, cosines)) < 1 + 1e-5
    assert min(cosines) < 0.99


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "num_shares"), [("shard", 2), ("tensor", 1)])
def test_a_run_of_two_ranks_is_replayed_by_one_but_for_rounding(launch: Launch, mesh, num_shares):
    ranks = ("--set=learner.num_ranks=2", f"--set=learner.mesh.{mesh}=2")
    settings = ("--set=run.max_steps=3", "--set=buffer.record=true")
    run = launch("--new", *ranks, *settings)
    assert run.end() == 0, run.output
    assert [len(files) for files in recorded_steps(run.folder).values()] == 3 * [num_shares]
    output = replay("streamrl replay runs/quickstart", run.folder)
    assert "the weights of the checkpoints at version 3 but for" in output
    report = json.loads((run.folder / "replay" / "replay.json").read_text())
    assert 0 < report["checkpoints"][0]["largest_difference"] < 1e-5
    for step, line in zip(report["steps"], run.lines, strict=True):
        found = step["recorded"]["metrics"]
        assert "reward" in found
        assert found == pytest.approx({n: line[MEASURES[n]] for n in found}, rel=1e-3, abs=1e-5)


def replay(command: str, run: Path) -> str:
    program, *words = command.replace("runs/quickstart", str(run)).split()
    assert program == "streamrl"
    return output_of(*words)
