"""Runs that a learner must end, and one that it must not: real daemons, seen from outside."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.errors import EXIT_DIVERGED
from tests.system.conftest import Launched

Launch = Callable[..., Launched]

HUGE = """
def score(episode):
    return 3e38 if episode.prompt.answer < "5" else -3e38
"""

THREE_TRIES = """
from streamrl.interfaces import Observation, Transition


class ThreeTries:
    def __init__(self):
        self._num_tries = 0

    async def start(self, context):
        self._again = Observation(token_ids=context.prompt_token_ids)
        return self._again

    async def step(self, completion):
        self._num_tries += 1
        return Transition(observation=self._again, done=self._num_tries == 3)
"""


@pytest.mark.long
def test_gradients_that_stay_infinite_end_the_run_and_start_nothing_again(
    launch: Launch, tmp_path: Path
):
    (tmp_path / "huge.py").write_text(HUGE)
    run = launch(
        f"--set=data.reward={tmp_path}/huge.py:score",
        "--set=algorithm.advantage=reinforce",
        "--set=learner.optimizer.max_skipped_updates=1",
    )
    assert run.end() == EXIT_DIVERGED, run.output
    assert "2 updates in a row were skipped" in run.output
    assert run.log("learner").count("attached at version") == 1
    assert [line["learner/skipped_update"] for line in run.lines] == [1.0]


@pytest.mark.long
def test_a_long_trajectory_is_trained_and_epochs_end_the_run(launch: Launch, tmp_path: Path):
    (tmp_path / "tries.py").write_text(THREE_TRIES)
    rows = [{"prompt": f"c{i}=", "answer": str(i)} for i in range(10, 16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = launch(
        f"--set=generator.environment={tmp_path}/tries.py:ThreeTries",
        "--set=generator.max_model_len=64",
        "--set=learner.max_tokens_per_micro_batch=14",
        f"--set=data.source={tmp_path}/rows.jsonl",
        "--set=run.total_epochs=2",
        "--set=run.max_steps=100",
        "--set=run.max_restarts=0",
    )
    assert run.end() == 0, run.output
    lines = run.lines
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["learner/num_long_trajectories"] for line in lines) > 0
    assert "has a micro-batch of its own" in run.log("learner")
    assert run.books["balanced"]
