"""Recorded steps, trained again: the same weights, other settings beside them, and the refusals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.make_model import make_tokenizer
from learners import step_record
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.records import RunRecords
from learners.checkpoints.restore import choose, load_trainer
from learners.executor.lockstep import Accumulate, Discard, LearnerRank, Save, Update
from learners.parallel.ranks import Ranks
from learners.replay import Replay, choose_start
from learners.session import LearnerState
from learners.step_record import Recorder
from streamrl import wire
from streamrl.checkpoints.find import checkpoints_of, path_of
from streamrl.checkpoints.history import continued, new_history, write_history
from streamrl.cli.main import main
from streamrl.config import RunConfig, to_yaml
from streamrl.errors import ConfigError
from streamrl.types import Books, GroupHeader, TrajectoryGroup
from tests.checkpoints import HISTORY, write_checkpoint
from tests.full_disk import files_no_larger_than
from tests.records import with_candidates
from tests.tiny_model import save_llama
from tests.training import make_config, make_groups

ALGORITHM = {"kl_reward": {"coef": 0.1, "controller": "adaptive"}, "pf_ppo": {}}
"""With state from step to step, and random numbers."""
CANDIDATES = {"loss": "dppo_tv", "proximal": "behavior", "loss_config": {"divergence_topk": 3}}


def configure(folder: Path, algorithm: dict[str, Any] | None = None, **buffer: Any) -> RunConfig:
    """Of a run whose folder has its configuration."""
    model = folder / "model"
    if not model.exists():
        save_llama(model)
        make_tokenizer("abc").save_pretrained(model)
    config = make_config(
        model={"path": str(model)},
        run={"folder": folder, "name": "run", "resume": "auto", "max_steps": 9},
        learner={"device": "cpu", "num_threads": 1, "checkpoint": {"keep": 9}},
        algorithm=ALGORITHM if algorithm is None else algorithm,
        buffer={"record": True, **buffer},
    )
    config.run.path.mkdir(exist_ok=True)
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    return config


async def fetch(_: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
    return ()


def train(config: RunConfig, last: int, saved: Sequence[int], sizes: Sequence[int] = (5,)) -> None:
    """As a learner that starts from the newest checkpoint and is killed after version `last`: what
    it has not saved is not flushed, and nothing is closed."""
    start = choose(config.run)
    trainer, state = load_trainer(config, start.checkpoint)
    recorder = Recorder(config, start.history)
    records = RunRecords(config, start, recorder=recorder)
    records.begin()
    rank = LearnerRank(
        trainer,
        Ranks(),
        fetch=fetch,
        save=records.save,
        snapshot=lambda *_: None,
        record=recorder.add,
    )
    for version in range(state.policy_version, last):
        # Whoever trains a version anew gets other groups than its predecessor.
        groups = make_groups(seed=100 * state.policy_version + version)
        groups = tuple(with_candidates(group, 9, 3) for group in groups)
        for part in cut(groups, sizes):
            rank.execute(Accumulate(headers_of(part), version), part)
        records.log(version + 1, headers_of(groups), rank.execute(Update()))
        if version + 1 in saved:
            rank.execute(Save(LearnerState(version + 1))).result()


def cut(groups: Sequence[TrajectoryGroup], sizes: Sequence[int]) -> Any:
    for size in sizes:
        yield groups[:size]
        groups = groups[size:]


def headers_of(groups: Sequence[TrajectoryGroup]) -> tuple[GroupHeader, ...]:
    return tuple(map(GroupHeader.of, groups))


def replayed(run: Path, *overrides: str, **arguments: Any) -> Any:
    replay = Replay(run, overrides, **arguments)
    list(replay.steps())
    return replay.report()


@pytest.mark.parametrize("algorithm", [ALGORITHM, {"advantage": "gae"}, {}, CANDIDATES], ids=str)
def test_a_killed_and_resumed_run_is_replayed_bit_for_bit(tmp_path, algorithm):
    config = configure(tmp_path, algorithm)
    sizes = (2, 3) if algorithm == {} else (5,)
    train(config, last=4, saved=[2], sizes=sizes)
    train(config, last=6, saved=[5, 6], sizes=sizes)
    assert sorted(step_record.recorded_steps(config.run.path)) == [1, 2, 3, 4, 5, 6]
    report = replayed(config.run.path)
    assert [step.step for step in report.steps] == [1, 2, 3, 4, 5, 6]
    found = [(c.policy_version, c.largest_difference) for c in report.checkpoints]
    assert found == [(2, 0.0), (5, 0.0), (6, 0.0)]
    later = replayed(config.run.path, version=5)
    assert [step.step for step in later.steps] == [6]
    assert later.sha256 == report.sha256


def test_steps_that_are_not_of_the_history_are_forgotten(tmp_path):
    """By a learner that does not record, too, and by one that goes on from another run."""
    config = configure(tmp_path, {})
    train(config, last=4, saved=[2])
    silent = RunRecords(config, choose(config.run))
    silent.begin()
    silent.close()
    assert sorted(step_record.recorded_steps(config.run.path)) == [1, 2]
    (tmp_path / "other").mkdir()
    other = configure(tmp_path / "other", {})
    train(other, last=1, saved=[1])
    named = config.run.model_copy(update={"resume": str(path_of(other.run.path, 1))})
    records = RunRecords(config, choose(named))
    records.begin()
    records.close()
    assert not step_record.recorded_steps(config.run.path)


def test_other_weights_are_said(tmp_path, capsys):
    """Where the record is of another batch than the one that was trained."""
    config = configure(tmp_path, {})
    train(config, last=2, saved=[2])
    groups = make_groups(seed=7)
    (path,) = step_record.recorded_steps(config.run.path)[1]
    parts = (step_record.RecordedPart.of(headers_of(groups), groups),)
    path.write_bytes(step_record.encode(step_record.StepRecord(1, 1, parts)))
    assert main(["replay", str(config.run.path)]) == 1
    assert "the replay of version 2 is not" in capsys.readouterr().err


def test_other_settings_are_compared_step_by_step(tmp_path, capsys):
    config = configure(tmp_path, {"rollout_is": "token_is"})
    train(config, last=3, saved=[3])
    command = ["replay", str(config.run.path)]
    changes = ["--set", "algorithm.rollout_is=m2po", "--set", "learner.optimizer.lr=2e-3"]
    assert main([*command, *changes, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "the same weights, bit for bit, as the checkpoints at version 3" in output
    report = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert report["settings"] == ["algorithm.rollout_is=m2po", "learner.optimizer.lr=2e-3"]
    assert report["sha256"] != report["changed_sha256"]
    first, *_, last = report["steps"]
    assert 0 < first["cosine"] < 0.999
    assert first["recorded"]["estimated_reward"] == first["changed"]["estimated_reward"]
    assert last["recorded"]["estimated_reward"] != last["changed"]["estimated_reward"]
    assert first["changed"]["metrics"]["lr"] == 2 * first["recorded"]["metrics"]["lr"]
    assert first["changed"]["update_norm"] > 1.5 * first["recorded"]["update_norm"]
    assert first["distance"] > 0.5
    assert last["distance"] > 0.1


def test_the_preset_is_compared_with_a_run_of_none(tmp_path):
    config = configure(tmp_path, {"preset": None})
    train(config, last=2, saved=[])
    report = replayed(config.run.path, "algorithm.preset=stream")
    assert report.steps[0].cosine < 0.9
    assert report.sha256 != report.changed_sha256


def test_the_same_settings_have_the_same_updates(tmp_path):
    config = configure(tmp_path)
    train(config, last=2, saved=[])
    report = replayed(config.run.path, "learner.optimizer.lr=1e-3")
    assert [step.cosine for step in report.steps] == pytest.approx([1.0, 1.0])
    assert [step.distance for step in report.steps] == [0.0, 0.0]
    assert report.sha256 == report.changed_sha256


def test_the_estimated_reward_is_the_weighted_mean_of_the_rewards(tmp_path):
    config = configure(tmp_path, {})
    train(config, last=1, saved=[])
    (step,) = replayed(config.run.path).steps
    groups = [with_candidates(group, 9, 3) for group in make_groups(seed=0)]
    trainer, _ = load_trainer(config, None)
    batch = TrainingBatch.of(groups, policy_version=0)
    gaps = batch.sequences.sum((trainer.logprobs(batch) - batch.behavior_logprobs).double())
    weights = gaps.clamp(-20, 20).exp()
    expected = float((weights * batch.rewards).sum() / weights.sum())
    assert step.recorded.estimated_reward == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("generator.top_p=0.5", r"--set generator\.top_p: a replay trains recorded batches"),
        ("learner.groups_per_step=4", "without groups_per_step"),
        ("algorithm.rollout_is=m2pp", "did you mean 'm2po'"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(tmp_path, override, sentence):
    config = configure(tmp_path)
    train(config, last=1, saved=[])
    with pytest.raises(ConfigError, match=sentence):
        Replay(config.run.path, [override])


def test_where_a_replay_can_begin_is_said(tmp_path):
    config = configure(tmp_path)
    with pytest.raises(ConfigError, match=r"rum is no run folder: there is none; did you mean"):
        Replay(tmp_path / "rum")
    with pytest.raises(ConfigError, match=r"nothing is recorded; set buffer\.record: true"):
        Replay(config.run.path)
    train(config, last=4, saved=[2, 3])
    step_record.recorded_steps(config.run.path)[1][0].unlink()
    assert Replay(config.run.path).last_step == 4
    assert Replay(config.run.path, version=3).last_step == 4
    with pytest.raises(ConfigError, match=r"--from 1: the steps 2 to 4 .* begin from 2, 3$"):
        Replay(config.run.path, version=1)
    with pytest.raises(ConfigError, match=r"--from 4"):
        Replay(config.run.path, version=4)
    assert Replay(config.run.path, num_steps=1).last_step == 3
    with pytest.raises(ConfigError, match=r"--steps: was 0; must be at least 1"):
        Replay(config.run.path, num_steps=0)


def test_a_replay_begins_at_the_checkpoint_that_the_run_started_from(tmp_path):
    """Whatever its folder is called; a damaged one is passed over."""
    run = tmp_path / "run"
    named = write_checkpoint(tmp_path / "other", 10, Books()).rename(tmp_path / "my-best")
    write_history(checkpoints_of(run), continued(HISTORY, 10, named, str(named)))
    write_checkpoint(run, 20, Books())
    start = choose_start(run, range(11, 31), None)
    assert start is not None
    assert (start.path, start.policy_version) == (named, 10)
    (named / "state.json").write_bytes(b"")
    start = choose_start(run, range(11, 31), 20)
    assert start is not None
    assert start.policy_version == 20
    with pytest.raises(ConfigError, match=r"--from 10: .* complete checkpoints are at 0, 20:"):
        choose_start(run, range(11, 31), 10)


def test_a_step_that_another_release_recorded_is_not_called_damaged(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(wire, "SCHEMA_VERSION", 12)
        data = step_record.encode(step_record.StepRecord(1, 1, ()))
    path = tmp_path / "step-00000001.rank-00.zst"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"another release of StreamRL recorded {path}; replay"):
        step_record.read_step([path])


def test_a_damaged_record_and_a_missing_rank_are_named(tmp_path):
    config = configure(tmp_path)
    train(config, last=1, saved=[])
    (path,) = step_record.recorded_steps(config.run.path)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match=r"step-00000001\.rank-00\.zst is damaged"):
        step_record.read_step([path])
    groups = make_groups()
    parts = (step_record.RecordedPart.of(headers_of(groups), groups[:2]),)
    path.write_bytes(step_record.encode(step_record.StepRecord(1, 2, parts)))
    with pytest.raises(ConfigError, match="trained by 2 ranks, and the records of 1 are there"):
        step_record.read_step([path])


def test_the_groups_of_all_ranks_come_back_in_the_order_of_the_batch(tmp_path):
    config, groups = configure(tmp_path), make_groups()
    for rank, mine in enumerate((groups[1::2], groups[::2])):
        recorder = Recorder(config, HISTORY, rank, num_ranks=2)
        recorder.add(1, [(headers_of(groups), mine)])
    (part,) = step_record.read_step(step_record.recorded_steps(config.run.path)[1])
    assert [group.group_id for group in part.groups] == [group.group_id for group in groups]
    assert all(
        (ours.trajectories[0].token_ids == theirs.trajectories[0].token_ids).all()
        for ours, theirs in zip(part.groups, groups, strict=True)
    )


def test_the_oldest_steps_are_dropped_at_the_limit(tmp_path, caplog):
    groups = make_groups()
    part = [(headers_of(groups), groups)]
    config = configure(tmp_path)
    recorder = Recorder(config, HISTORY)
    recorder.add(1, part)
    (path,) = step_record.recorded_steps(config.run.path)[1]
    limited = configure(tmp_path, record_max_bytes=int(3.5 * path.stat().st_size))
    recorder = Recorder(limited, HISTORY)
    for step in range(2, 8):
        recorder.add(step, part)
    recorder.flush()
    assert sorted(step_record.recorded_steps(config.run.path)) == [5, 6, 7]
    assert len([m for m in caplog.messages if "the oldest steps are dropped" in m]) == 1


def test_steps_that_a_rank_has_dropped_are_none_to_begin_with(tmp_path):
    config, groups = configure(tmp_path), make_groups()
    run = config.run.path
    for rank, first in enumerate((1, 3)):
        recorder = Recorder(config, HISTORY, rank, num_ranks=2)
        for step in range(first, 7):
            recorder.add(step, [(headers_of(groups), groups[rank::2])])
    for version in (1, 4):
        write_checkpoint(run, version, Books())
    files = step_record.recorded_steps(run)
    assert sorted(files) == [3, 4, 5, 6]
    start = choose_start(run, files, None)
    assert start is not None
    assert start.policy_version == 4
    files[5][1].unlink()
    with pytest.raises(ConfigError, match="step 5 was trained by 2 ranks, and the records of 1"):
        step_record.read_step(step_record.recorded_steps(run)[5])
    for step in (3, 4, 6):
        files[step][1].unlink()
    assert sorted(step_record.recorded_steps(run)) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_keeps_records_in_memory_until_it_has_room(tmp_path):
    config, groups = configure(tmp_path), make_groups()
    recorder = Recorder(config, HISTORY)
    part = [(headers_of(groups), groups)]
    with files_no_larger_than(100):
        recorder.add(1, part)
        recorder.add(2, part)
        with pytest.raises(OSError, match="File too large"):
            recorder.flush()
    assert not step_record.recorded_steps(config.run.path)
    recorder.flush()
    assert sorted(step_record.recorded_steps(config.run.path)) == [1, 2]
    assert not list((config.run.path / "record").glob(".*"))


def test_a_learner_that_was_taken_over_records_nothing(tmp_path, caplog):
    config, groups = configure(tmp_path), make_groups()
    older, successor = Recorder(config, HISTORY), new_history()
    older.add(1, [(headers_of(groups), groups)])
    write_history(checkpoints_of(config.run.path), successor)
    Recorder(config, successor).add(2, [(headers_of(groups[:2]), groups[:2])])
    older.add(2, [(headers_of(groups), groups)])
    older.flush()
    files = step_record.recorded_steps(config.run.path)
    numbers = {
        step: len(step_record.read_step(of_step)[0].groups) for step, of_step in files.items()
    }
    assert numbers == {1: len(groups), 2: 2}
    assert not list((config.run.path / "record").glob(".*"))
    assert "this one records no step" in caplog.text


def test_a_record_that_could_not_be_synced_is_synced_by_the_next_flush(tmp_path, monkeypatch):
    config, groups = configure(tmp_path), make_groups()
    recorder = Recorder(config, HISTORY)
    recorder.add(1, [(headers_of(groups), groups)])

    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    synced: list[Path] = []
    monkeypatch.setattr("learners.step_record.sync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        recorder.flush()
    monkeypatch.setattr("learners.step_record.sync", synced.append)
    recorder.flush()
    recorder.flush()
    assert [path.name for path in synced] == ["step-00000001.rank-00.zst", "record"]


def test_a_discarded_part_is_in_no_record(tmp_path):
    config, groups = configure(tmp_path, {}), make_groups()
    trainer, _ = load_trainer(config, None)
    seen: list[Any] = []
    rank = LearnerRank(
        trainer,
        Ranks(),
        fetch=fetch,
        save=lambda *_: None,
        snapshot=lambda *_: None,
        record=lambda step, parts: seen.append((step, [len(h) for h, _ in parts])),
    )
    rank.execute(Accumulate(headers_of(groups[:1]), 0), groups[:1])
    rank.execute(Discard())
    for part in cut(groups, (2, 3)):
        rank.execute(Accumulate(headers_of(part), 0), part)
    rank.execute(Update())
    assert seen == [(1, [2, 3])]


def test_torch_threads_are_those_of_the_run(tmp_path):
    config = configure(tmp_path)
    train(config, last=1, saved=[])
    torch.set_num_threads(2)
    Replay(config.run.path)
    assert torch.get_num_threads() == 1
