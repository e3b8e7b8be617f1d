"""A run that was resumed with other settings is replayed by those that each step was made by."""

from pathlib import Path

import pytest

from learners.replay import Replay
from learners.step_record import settings_files
from streamrl.cli.main import main
from streamrl.config import RunConfig, to_yaml
from tests.unit.test_replay import configure, replayed, train


def resumed(config: RunConfig, max_steps: int = 9, **optimizer: object) -> RunConfig:
    """The run as it is launched again, with these settings of the optimizer."""
    changed = config.learner.optimizer.model_copy(update=optimizer)
    other = config.model_copy(
        update={
            "learner": config.learner.model_copy(update={"optimizer": changed}),
            "run": config.run.model_copy(update={"max_steps": max_steps}),
        }
    )
    (config.run.path / "config.yaml").write_text(to_yaml(other))
    return other


def firsts(run: Path) -> list[int]:
    return list(settings_files(run))


def test_a_replay_ends_where_other_settings_begin_and_one_from_there_goes_on(tmp_path, capsys):
    config = configure(tmp_path, {})
    train(config, last=2, saved=[2])
    train(resumed(config, lr=5e-3), last=4, saved=[4])
    assert firsts(config.run.path) == [1, 3]
    report = replayed(config.run.path)
    assert [step.step for step in report.steps] == [1, 2]
    assert [c.largest_difference for c in report.checkpoints] == [0.0]
    later = replayed(config.run.path, version=2)
    assert [step.step for step in later.steps] == [3, 4]
    assert [c.largest_difference for c in later.checkpoints] == [0.0]
    out = ["--out", str(tmp_path / "out")]
    assert main(["replay", str(config.run.path), *out]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "ends before step 3, which the run made with learner.optimizer.lr 0.005, not 0.001" in said
    )
    assert "--from 2 replays that" in said


def test_more_steps_end_a_replay_only_where_they_change_the_rate(tmp_path):
    config = configure(tmp_path, {})
    train(config, last=2, saved=[2])
    train(resumed(config, max_steps=20), last=3, saved=[3])
    report = replayed(config.run.path)
    assert [step.step for step in report.steps] == [1, 2, 3]
    assert [c.largest_difference for c in report.checkpoints] == [0.0, 0.0]


def test_more_steps_of_a_schedule_are_other_settings(tmp_path):
    config = resumed(configure(tmp_path, {}), schedule="linear")
    train(config, last=2, saved=[2])
    train(resumed(config, max_steps=20, schedule="linear"), last=3, saved=[3])
    replay = Replay(config.run.path)
    assert replay.last_step == 2
    assert replay.change == (3, "run.max_steps 20, not 9")
    (later,) = replayed(config.run.path, version=2).checkpoints
    assert later.largest_difference == 0.0


def test_settings_of_the_generator_that_the_learner_computes_with_count(tmp_path):
    config = configure(tmp_path, {})
    train(config, last=2, saved=[2])
    other = {"generator": config.generator.model_copy(update={"temperature": 0.5})}
    train(config.model_copy(update=other), last=3, saved=[3])
    replay = Replay(config.run.path)
    assert replay.change == (3, "generator.temperature 0.5, not 1.0")
    assert Replay(config.run.path, num_steps=1).change is None
    (later,) = replayed(config.run.path, version=2).checkpoints
    assert later.largest_difference == 0.0


def test_the_settings_of_forgotten_steps_are_forgotten_and_the_same_are_kept_once(tmp_path):
    config = configure(tmp_path, {})
    train(config, last=2, saved=[1, 2])
    train(resumed(config, lr=5e-3), last=3, saved=[])
    train(resumed(config, lr=5e-3), last=3, saved=[])
    assert firsts(config.run.path) == [1, 3]
    train(resumed(config), last=3, saved=[])
    assert firsts(config.run.path) == [1]
    assert Replay(config.run.path).last_step == 3


def test_a_record_without_settings_is_of_the_runs(tmp_path):
    config = configure(tmp_path, {})
    train(config, last=2, saved=[2])
    for path in settings_files(config.run.path).values():
        path.unlink()
    assert replayed(config.run.path).checkpoints[0].largest_difference == 0.0


@pytest.mark.parametrize("name", ["checkpoint", "rank_deadline_s"])
def test_what_computes_nothing_is_no_change(tmp_path, name):
    config = configure(tmp_path, {})
    train(config, last=1, saved=[1])
    value = {"checkpoint": config.learner.checkpoint.model_copy(update={"keep": 3})}.get(name, 9.0)
    learner = config.learner.model_copy(update={name: value})
    train(config.model_copy(update={"learner": learner}), last=2, saved=[2])
    assert firsts(config.run.path) == [1, 2]
    assert Replay(config.run.path).last_step == 2
