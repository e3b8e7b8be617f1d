"""Versions are validated while a run trains; a validator that is killed costs a validation."""

import re

import pytest

from streamrl.run_folder import read_json
from streamrl.samples.files import read_samples, validation_files
from streamrl.tracking.jsonl import read_validations
from tests.settings import set_options

REWARD = """
import itertools, pathlib, sys, time

groups = itertools.count(1)

def score(episodes):
    is_validator = "validator" in sys.argv
    time.sleep(0.2 if is_validator else 0.5)
    is_held = is_validator and next(groups) > 32
    while is_held and not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    return [float(e.response.strip() == e.prompt.answer) for e in episodes]
"""
BEGUN = re.compile(r"validating version ([1-9]\d*) on 32 prompts")


@pytest.mark.long
def test_a_killed_validator_delays_nobody_and_the_last_version_is_validated(launch, tmp_path):
    """It is killed in its second validation, which does not end before."""
    reward = tmp_path / "slow.py"
    reward.write_text(REWARD.format(go=str(tmp_path / "go")))
    settings = (
        f"data.reward={reward}:score",
        "validation.every=4",
        "validation.num_samples=4",
        "validation.temperature=0.8",
        "learner.checkpoint.keep_best=1",
        "learner.checkpoint.every=2",
        "learner.checkpoint.best_by=validation/mean@4",
    )
    run = launch(*set_options(*settings), strict=False)
    run.until(lambda: BEGUN.search(run.log("validator")) is not None)
    run.kill("validator")
    (tmp_path / "go").touch()
    (interrupted,) = map(int, BEGUN.findall(run.log("validator")))
    assert f"version {interrupted}: mean@4" not in run.log("validator")
    assert run.end() == 0, run.log("learner")
    assert "validator: was killed by SIGKILL" in run.output
    assert [line["step"] for line in run.lines] == list(range(1, 13))
    assert run.books["balanced"]
    validated = read_validations(run.folder)
    assert {0, 12} <= validated.keys()
    assert all(found["validation/num_prompts"] == 32 for found in validated.values())
    files = validation_files(run.folder)
    assert [int(file.stem) for file in files] == sorted(validated)
    for file in files:
        samples = list(read_samples(file))
        assert len(samples) == 32 * 4
        assert {(s.version, s.newest_version) for s in samples} == {(int(file.stem),) * 2}
        assert all(s.answer and s.rewards == {"score": s.reward} for s in samples)
        mean = sum(sample.reward for sample in samples) / len(samples)
        assert abs(mean - validated[int(file.stem)]["validation/mean@4"]) < 1e-6
    assert "the run is over" in run.log("validator")


@pytest.mark.long
def test_a_run_with_held_out_prompts_has_a_baseline_and_a_final_score_without_being_asked(
    launch, tmp_path
):
    """Of which the last validation is the evaluation: the checkpoint is not scored again."""
    reward = tmp_path / "slow.py"
    reward.write_text(REWARD.format(go=str(tmp_path)))
    held_out = ("data.eval_source=copy", "data.num_eval_prompts=8", "run.evaluate=true")
    settings = (*held_out, f"data.reward={reward}:score")
    run = launch(*set_options(*settings))
    assert run.end() == 0, run.log("validator")
    validated = read_validations(run.folder)
    assert {0, 12} <= validated.keys()
    assert len(validated) < 12, "it rests"
    log = run.log("validator")
    assert log.index("waiting for the first step") < log.index("validator serves")
    evaluation = read_json(run.folder / "evaluation.json")
    assert evaluation["by"] == "validator"
    assert evaluation["greedy_reward_mean"] == validated[12]["validation/mean@1"]
    assert "evaluated" not in run.output
    assert "versions 0 and 12" in " ".join(run.output.split())


def test_a_run_that_ends_before_its_validator_has_reported_waits_for_it(launch):
    settings = ("data.eval_source=copy", "data.num_eval_prompts=8", "run.max_steps=2")
    run = launch(*set_options(*settings))
    assert run.end() == 0, run.log("validator")
    assert {0, 2} <= read_validations(run.folder).keys()
    assert "versions 0 and 2" in " ".join(run.output.split())
