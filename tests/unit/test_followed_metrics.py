"""The live view follows a run of weeks: what it reads and keeps of the metrics is bounded."""

from itertools import pairwise
from pathlib import Path

from streamrl.samples.files import read_samples
from streamrl.tracking import jsonl as module
from streamrl.tracking.jsonl import FollowedMetrics, JsonlTracker, read_metrics


def write_steps(path: Path, steps: range) -> None:
    tracker = JsonlTracker(path, first_step=steps.start)
    for step in steps:
        tracker.log({"reward/mean": step / 10, "other": "x" * 20}, step)
    tracker.close()


def test_metrics_are_followed_at_the_cost_of_what_is_new(tmp_path: Path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    followed = FollowedMetrics(path)
    assert followed.read() == []
    write_steps(path, range(1, 31))
    assert [line["step"] for line in followed.read()] == list(range(1, 31))
    with path.open("a") as file:
        file.write('{"step": 31, "rew')
    parsed: list[str] = []
    monkeypatch.setattr(module.json, "loads", parsed.append)
    assert followed.read()[-1] == {"step": 30, "reward/mean": 3.0, "other": "x" * 20}
    assert parsed == []


def test_what_is_kept_of_followed_metrics_is_bounded_and_even(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    followed = FollowedMetrics(path)
    for start in range(1, 9001, 3000):
        write_steps(path, range(start, start + 3000))
        lines = followed.read()
        assert len(lines) <= 1021
    steps = [line["step"] for line in lines]
    assert steps[-20:] == list(range(8981, 9001))
    assert {b - a for a, b in pairwise(steps[:-20])} == {16}
    assert lines[0] == {"step": 1, "reward/mean": 0.1}


def test_metrics_of_a_learner_that_went_back_are_followed_anew(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    followed = FollowedMetrics(path)
    write_steps(path, range(1, 51))
    followed.read()
    write_steps(path, range(11, 101))
    assert [line["step"] for line in followed.read()] == list(range(1, 101))


def test_a_damaged_line_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    deep = b'{"step": 9, "a": ' + b"[" * 100_000
    path.write_bytes(b'{"step": 1}\n\xff{\n[]\n7\n' + deep + b'\n{"step": 2}\n')
    assert [line["step"] for line in FollowedMetrics(path).read()] == [1, 2]
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert list(read_samples(path)) == []
