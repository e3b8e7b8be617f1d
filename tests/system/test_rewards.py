"""A run with several rewards goes on with one that hangs, and says whose groups it lost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.settings import set_options
from tests.system.conftest import Launched
from tests.system.test_launch import assert_books_close, assert_every_step_once

Launch = Callable[..., Launched]

# The run takes several heartbeats, which report the failures.
OWN = """
import threading, time

def hangs(episode):
    threading.Event().wait()

def slow(episode):
    time.sleep(1)
    return 0.0
"""
NUM_STEPS = 9


@pytest.mark.long
def test_a_run_with_two_rewards_by_data_source_goes_on_with_a_hanging_one(
    launch: Launch, tmp_path: Path
):
    prompts, own = tmp_path / "prompts.jsonl", tmp_path / "own.py"
    sources = ["words", "words", "words", "judged"]
    rows = [
        {"prompt": f"c{i}=", "answer": str(i), "data_source": sources[i % 4]} for i in range(10, 50)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own.write_text(OWN)
    rewards = [
        {"reward": "exact_match", "data_source": ["words"]},
        {"reward": "regex", "name": "digits", "weight": 0.5, "kwargs": {"pattern": "[0-9]+"}},
        {"reward": f"{own}:slow", "data_source": ["words"], "weight": 0},
        {"reward": f"{own}:hangs", "data_source": ["judged"], "timeout_s": 0.2},
    ]
    run = launch(
        *set_options(
            f"data.source={prompts}",
            "data.source_kwargs={}",
            f"data.rewards={json.dumps(rewards)}",
            f"run.max_steps={NUM_STEPS}",
        )
    )
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, NUM_STEPS)
    assert_books_close(run)
    last = lines[-1]
    assert last["buffer/dropped_failed"] > 0
    assert last["reward/hangs/num_failures"] > 0
    assert all(0 <= line["reward/digits"] <= 1 and line["reward/slow"] == 0 for line in lines)
    values = [line["reward/exact_match"] + 0.5 * line["reward/digits"] for line in lines]
    assert values == pytest.approx([line["reward/mean"] for line in lines])
    assert last["reward/exact_match/num_failures"] == last["reward/digits/num_failures"] == 0
    sentence = f"reward {own}:hangs has not answered within timeout_s, which is 0.2 s"
    assert sentence in run.log("generator-0")
