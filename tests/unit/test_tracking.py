"""Metrics arrive once per step, survive a resume, and no tracker can end a run."""

import errno
import json
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import msgspec
import pytest
import wandb

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.metrics import books_metrics, buffer_metrics, generator_metrics, staleness_metrics
from streamrl.samples.files import write_validation
from streamrl.samples.record import Sample
from streamrl.tracking import Trackers, jsonl, open_trackers
from streamrl.tracking.dashboards import FINISH_S, HELD_OUT, TrackioTracker
from streamrl.tracking.jsonl import (
    JsonlTracker,
    read_after,
    read_last,
    read_metrics,
    read_newest,
)
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    OverduePolicy,
)
from tests.full_disk import files_no_larger_than
from tests.waiting import block_until


def make_config(tmp_path: Path, **tracking: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"folder": tmp_path, "name": "run"},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "tracking": tracking,
        }
    )


def test_a_resumed_run_has_one_line_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, first_step=1)
    for step in range(1, 6):
        tracker.log({"reward/mean": step / 10}, step)
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 6, "reward/me')
    again = JsonlTracker(path, first_step=4)
    values = {"learner/grad_norm": float("nan"), "learner/lr": 3.3333333333e-8}
    again.log({"reward/mean": 9.0, **values}, 4)
    again.close()
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["reward/mean"] for line in lines] == [0.1, 0.2, 0.3, 9.0]
    assert (lines[-1]["learner/grad_norm"], lines[-1]["learner/lr"]) == (None, 3.3333333e-8)


def test_of_a_long_run_only_what_is_asked_for_is_kept_but_for_the_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}, "a": {i}, "b": 1}}\n' for i in (1, 2, 3)))
    *others, last = read_metrics(path, {"a"})
    assert others == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]
    assert last == {"step": 3, "a": 3, "b": 1}


def test_the_newest_lines_are_read_however_long_and_however_many_there_are(tmp_path, monkeypatch):
    path, parse, parsed = tmp_path / "metrics.jsonl", jsonl.parsed_line, []
    short = "".join(f'{{"step": {step}}}\n' for step in range(1, 10_001))
    long = "".join(
        json.dumps({"step": step, "a": "x" * 400_000}) + "\n" for step in (10_001, 10_002)
    )
    path.write_text(short + long)
    monkeypatch.setattr(jsonl, "parsed_line", lambda text: parsed.append(text) or parse(text))
    assert [line["step"] for line in read_newest(path, 3)] == [10_000, 10_001, 10_002]
    assert [line["step"] for line in read_after(path, 10_000)] == [10_001, 10_002]
    assert read_last(path)["step"] == 10_002
    assert len(parsed) < 20


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_a_full_disk_costs_no_line_and_tears_none(tmp_path, caplog):
    path = tmp_path / "trained.jsonl"
    tracker = JsonlTracker(path, first_step=1)
    tracker.log({"prompt_indices": [1, 2]}, 1)
    # The disk takes half of the next line.
    with files_no_larger_than(path.stat().st_size + 10):
        for step in (2, 3):
            tracker.log({"prompt_indices": [step, 10 * step]}, step)
        with pytest.raises(OSError, match="File too large"):
            tracker.flush()
        assert path.read_text().endswith("2]}\n")
        assert steps_of(path) == [1]
    assert [r.message.partition(":")[0] for r in caplog.records] == [f"{path} waits in memory"]
    tracker.flush()
    assert steps_of(path) == [1, 2, 3]
    tracker.log({"prompt_indices": [4]}, 4)
    tracker.close()
    assert steps_of(path) == [1, 2, 3, 4]


def failing_call(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_line_of_which_the_disk_keeps_a_part_tears_none(tmp_path, monkeypatch):
    path = tmp_path / "trained.jsonl"
    tracker = JsonlTracker(path, first_step=1)
    with files_no_larger_than(5), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", failing_call)
        tracker.log({}, 1)
    assert path.stat().st_size == 5
    tracker.log({}, 2)
    assert steps_of(path) == [1, 2]


def test_lines_that_the_disk_took_and_did_not_keep_are_written_again(tmp_path, monkeypatch):
    """As a network file system does whose quota is used up."""
    path = tmp_path / "trained.jsonl"
    tracker = JsonlTracker(path, first_step=1)
    tracker.log({}, 1)
    tracker.flush()
    tracker.log({}, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_call)
        with pytest.raises(OSError, match="output error"):
            tracker.flush()
    os.truncate(path, path.stat().st_size - 5)
    tracker.flush()
    assert steps_of(path) == [1, 2]


def test_a_learner_that_was_taken_over_leaves_the_lines_of_the_other_alone(tmp_path, monkeypatch):
    path, goes_on = tmp_path / "trained.jsonl", [True]
    before = JsonlTracker(path, first_step=1, survives=lambda: goes_on[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_call)
        for step in (1, 2, 3):
            before.log({}, step)
        with pytest.raises(OSError, match="output error"):
            before.flush()
    goes_on[0] = False
    after = JsonlTracker(path, first_step=2)
    after.log({}, 2)
    after.flush()
    before.close()
    after.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_file_is_cut_where_a_run_goes_on_although_the_disk_is_full(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, first_step=1)
    for step in range(1, 6):
        tracker.log({}, step)
    tracker.close()
    with files_no_larger_than(0):
        JsonlTracker(path, first_step=4).close()
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["{", "null", '{"step": "x"}', "\x00\x00\x00"])
def test_a_damaged_line_in_the_middle_costs_that_line_only(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', damage, '{"step": 3}', '{"step": 4}', '{"st']
    path.write_text("\n".join(lines))
    assert steps_of(path) == [1, 3, 4]
    JsonlTracker(path, first_step=4).close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


class TablelessTracker:
    """As one that was written before there were tables of validations."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, metrics: object, step: int) -> None:
        self.steps.append(step)

    def log_samples(self, samples: object, step: int) -> None:
        raise ValueError("too many columns")

    def close(self) -> None: ...


def lines_in(file: Path) -> JsonlTracker:
    return JsonlTracker(file, first_step=1)


def test_a_table_that_fails_costs_itself_and_not_the_trackers_numbers(tmp_path, caplog):
    tracker = TablelessTracker()
    trackers = Trackers(lines_in(tmp_path / "m.jsonl"), [tracker])
    write_versions(tmp_path)
    trackers.log_samples(ROWS, 1)
    trackers.log_validation_samples(tmp_path, 4)
    trackers.log({"x": 1.0}, 2)
    trackers.close()
    assert tracker.steps == [2]
    said = [record.message for record in caplog.records]
    assert said[0] == "TablelessTracker lacks a table of samples: too many columns"
    assert "no attribute 'log_validation_samples'" in said[1]
    assert len(said) == 2


class BrokenTracker:
    def log(self, metrics: object, step: int) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise OSError("gone")


def test_a_tracker_that_fails_is_switched_off(tmp_path, caplog):
    trackers = Trackers(lines_in(tmp_path / "m.jsonl"), [BrokenTracker()])
    for step in (1, 2):
        trackers.log({"x": 1.0}, step)
    trackers.close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]
    assert [r.message for r in caplog.records] == ["BrokenTracker is switched off"]


def test_a_tracker_that_was_switched_off_is_not_waited_for(tmp_path, caplog):
    trackers = Trackers(lines_in(tmp_path / "m.jsonl"), [BrokenTracker()])
    trackers.log({"x": 1.0}, 1)
    block_until(lambda: caplog.records)
    trackers.log({"x": 1.0}, 2)
    trackers.close(wait_s=5.0)
    assert [r.message for r in caplog.records] == ["BrokenTracker is switched off"]


def test_tensorboard_gets_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(make_config(tmp_path, tensorboard=True), first_step=1)
    for step in (1, 2):
        trackers.log({"reward/mean": step / 2, "note": "text", "time_s": 3.0}, step)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    (layout,) = events.Tensors("custom_scalars__config__")
    (charts,) = layout.tensor_proto.string_val
    assert b"Effective sample size and mismatch" in charts
    assert rb"mismatch/staleness_(\w+)/kl" in charts
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]


FOUND = {"validation/mean@1": 0.75, "validation/policy_version": 4.0}
ROWS = [
    {
        "step": 6,
        "prompt": "<|user|>ask<|end|>",
        "messages": [{"role": "assistant", "content": "reply<|end|>"}],
        "special_tokens": ["<|end|>", "<|user|>"],
        "answer": "9",
        "extracted": "7",
        "reward": 1.5,
        "rewards": {"math": 1.0, "format": 0.5},
    }
]


def write_versions(run: Path) -> None:
    """Of two validations with one prompt, whose answer is 9."""
    for version in (0, 4):
        line = {"step": version, "version": version, "newest_version": version, "prompt_index": 3}
        own = {"sibling": 0, "environment": "e", "num_response_tokens": 1, "finish_reason": "stop"}
        text = [{"role": "assistant", "content": f"so {version}<|end|>"}]
        sample = {**ROWS[0], **line, **own, "messages": text, "extracted": str(version)}
        write_validation(run, version, [msgspec.convert(sample, Sample)], keep=2)


def test_tensorboard_has_validations_over_their_version_and_samples_as_a_table(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(make_config(tmp_path, tensorboard=True), first_step=1)
    trackers.log({"reward/mean": 0.5}, 5)
    trackers.log_validation(FOUND, 4)
    trackers.log({"reward/mean": 0.5, **FOUND}, 6)
    trackers.log_samples(ROWS, 6)
    write_versions(tmp_path / "run")
    trackers.log_validation_samples(tmp_path / "run", 4)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("validation/mean@1")]
    assert points == [(4, 0.75)]
    (table,) = events.Tensors("samples/text_summary")
    (text,) = table.tensor_proto.string_val
    assert (table.step, text.count(b"| reply |"), len(text.splitlines())) == (6, 1, 3)
    assert rb"| reward/math | reward/format |" in text
    (table,) = events.Tensors("validation/samples/text_summary")
    (text,) = table.tensor_proto.string_val
    *_, first, last = text.decode().splitlines()
    assert table.step == 4
    assert first == r"| 3 | ask | 9 | 0 | so 0 | 0 | 1\.5 | 1\.0 | 0\.5 |"
    assert last == r"| 3 | ask | 9 | 4 | so 4 | 4 | 1\.5 | 1\.0 | 0\.5 |"


def test_wandb_gets_a_validation_and_samples_without_another_step(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config(tmp_path, wandb="offline", console=False)
    trackers = open_trackers(config, first_step=1)
    trackers.log({"reward/mean": 0.5}, 5)
    trackers.log_validation(FOUND, 4)
    trackers.log_samples(ROWS, 5)
    write_versions(tmp_path / "run")
    trackers.log_validation_samples(tmp_path / "run", 4)
    trackers.log({"reward/mean": 0.75}, 6)
    block_until(lambda: wandb.run.step == 6, deadline_s=120.0, every_s=0.5)
    trackers.close()
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    # wandb's own process may write the end of the file after `finish`.
    block_until(lambda: b"validation/mean@1" in file.read_bytes())
    (media,) = (tmp_path / "run").glob("wandb/offline-run-*/files/media/table")
    (trained,) = media.glob("samples*.json")
    table = json.loads(trained.read_text())
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert [row[name] for name in ("prompt", "response", "reward/math")] == ["ask", "reply", 1.0]
    (held_out,) = media.glob("validation/samples*.json")
    table = json.loads(held_out.read_text())
    assert table["columns"] == [*HELD_OUT, "reward/math", "reward/format"]
    assert [row[:6] for row in table["data"]] == [
        [3, "ask", "9", 0, "so 0", "0"],
        [3, "ask", "9", 4, "so 4", "4"],
    ]


def test_wandb_offline_writes_a_run_that_a_resume_goes_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_FINISH_TIMEOUT", raising=False)
    config = make_config(tmp_path, wandb="offline", console=False)
    for step in (1, 2):
        trackers = open_trackers(config, first_step=step)
        assert wandb.run.settings.finish_timeout == FINISH_S
        trackers.log({"reward/mean": 0.25}, step)
        trackers.close()
    files = list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    identity = (tmp_path / "run" / "wandb-id").read_text()
    assert files
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    assert any(b"reward/mean" in file.read_bytes() for file in files)


def test_what_wandb_refuses_is_a_sentence_that_names_the_setting(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    config = make_config(tmp_path, wandb="online", console=False)
    with pytest.raises(ConfigError, match=r"^tracking\.wandb: was 'online', and .* `wandb login`"):
        open_trackers(config, first_step=1)


def test_a_run_goes_on_while_wandb_does_not_answer(tmp_path, monkeypatch, caplog):
    """It did when the run began: what follows waits in the run's folder."""
    begin = wandb.init

    def unanswered(mode: str, **given: Any) -> Any:
        if mode == "online":
            raise wandb.errors.CommError("connection refused")
        return begin(mode=mode, **given)

    monkeypatch.setattr(wandb, "init", unanswered)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config(tmp_path, wandb="online", console=False)
    with pytest.raises(ConfigError, match=r"^tracking\.wandb: was 'online', .* refused"):
        open_trackers(config, first_step=1)
    (config.run.path / "wandb-id").write_text("known")
    open_trackers(config, first_step=5).close()
    (file,) = config.run.path.glob("wandb/offline-run-*/*.wandb")
    assert file.name == "run-known.wandb"
    assert "W&B gets nothing before `wandb sync --append`: connection refused" in caplog.text


@pytest.fixture
def trackio_store(tmp_path, monkeypatch):
    """What Trackio keeps in a folder of the test's own; it makes no connection."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)

    connections: list[object] = []

    def refuse(_: socket.socket, address: object) -> None:
        connections.append(address)
        raise OSError("there is no network")

    def logged_out(**_: object) -> None:
        raise OSError("nobody is logged in to the hub")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub, "whoami", logged_out)
    yield import_module("trackio.sqlite_storage").SQLiteStorage
    assert not connections


def logged(store: Any, name: str = "run") -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k != "timestamp"} for line in store.get_logs("p", name)
    ]


def test_trackio_has_every_number_and_tables_of_samples(tmp_path, trackio_store):
    config = make_config(tmp_path, trackio=True, project="p", console=False)
    trackers = open_trackers(config, first_step=1)
    write_versions(tmp_path / "run")
    trackers.log({"reward/mean": 0.5, "note": "text", "time_s": 3.0}, 5)
    trackers.log_validation(FOUND, 4)
    trackers.log_validation_samples(tmp_path / "run", 4)
    trackers.log_samples(ROWS, 5)
    trackers.log({"reward/mean": 0.75, **FOUND}, 6)
    trackers.close()
    numbers = [line for line in logged(trackio_store) if not any("samples" in k for k in line)]
    assert numbers == [
        {"reward/mean": 0.5, "step": 5},
        {**FOUND, "step": 4},
        {"reward/mean": 0.75, "step": 6},
    ]
    tables = {k: v for line in logged(trackio_store) for k, v in line.items() if "samples" in k}
    (trained,) = tables["samples"]["_value"]
    expected = {"prompt": "ask", "response": "reply", "answer": "9", "extracted": "7"}
    assert {name: trained[name] for name in expected} == expected
    assert (trained["reward"], trained["reward/math"], trained["reward/format"]) == (1.5, 1.0, 0.5)
    versions = tables["validation/samples"]["_value"]
    assert [(row["prompt"], row["version"], row["response"]) for row in versions] == [
        ("ask", 0, "so 0"),
        ("ask", 4, "so 4"),
    ]
    assert trackio_store.get_run_config("p", "run")["run"]["name"] == "run"


def test_trackio_goes_on_with_the_run_of_a_folder_and_begins_one_for_another(
    tmp_path, trackio_store
):
    for folder, steps in (("a", (1, 2)), ("a", (2, 3)), ("b", (1,))):
        (tmp_path / folder / "run").mkdir(parents=True, exist_ok=True)
        config = make_config(tmp_path / folder, trackio=True, project="p", console=False)
        trackers = open_trackers(config, first_step=steps[0])
        for step in steps:
            trackers.log({"reward/mean": step / 4}, step)
        trackers.close()
    runs = {record["id"] for record in trackio_store.get_run_records("p")}
    steps_of_runs = [
        [line["step"] for line in trackio_store.get_logs("p", "run", run_id=run)] for run in runs
    ]
    assert sorted(steps_of_runs) == [[1], [1, 2, 3]]


def test_a_full_disk_leaves_a_tracker_what_it_knows_of_its_run(tmp_path, monkeypatch):
    """Else the learner could not go on with that run, or not at all."""
    resumes: list[str] = []

    def init(**given: Any) -> SimpleNamespace:
        resumes.append(given["resume"])
        return SimpleNamespace(log=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Table=dict, init=init))
    config = make_config(tmp_path, trackio=True, console=False)
    config.run.path.mkdir()
    TrackioTracker(config).log({}, 3)
    with files_no_larger_than(0), pytest.raises(OSError, match="too large"):
        TrackioTracker(config).log({}, 4)
    TrackioTracker(config).log({}, 4)
    assert resumes == ["never", "allow", "allow"]


def test_what_trackio_refuses_is_a_sentence_that_names_the_setting(tmp_path, trackio_store):
    config = make_config(tmp_path, trackio=True, project="my_system", console=False)
    with pytest.raises(ConfigError, match=r"^tracking\.trackio: Trackio says: "):
        open_trackers(config, first_step=1)


def test_the_console_says_the_essential(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trackers = open_trackers(make_config(tmp_path), first_step=1)
    trackers.log({"reward/mean": 0.5, "learner/wait_s": 0.01, "other": 3}, 7)
    trackers.close()
    assert caplog.messages == ["step 7  reward 0.5  wait_s 0.01"]


def test_the_books_columns_add_up_in_the_metrics():
    books = Books(
        granted=10,
        leased=1,
        buffered=2,
        taken=1,
        trained=1,
        acknowledged=3,
        dropped={DropReason.STALE: 2},
    )
    metrics = books_metrics(books)
    columns = sum(
        metrics[f"buffer/{c}"] for c in ("leased", "buffered", "taken", "trained", "acknowledged")
    )
    dropped = sum(value for name, value in metrics.items() if "dropped_" in name)
    assert metrics["buffer/granted"] == columns + dropped
    assert metrics["buffer/dropped_stale"] == 2
    assert metrics["buffer/dropped_expired"] == 0
    assert metrics["buffer/books_balanced"] == 1.0


def test_generators_are_told_apart_and_together():
    generators = tuple(
        GeneratorStatus(
            generator_id=f"g{i}",
            session="s",
            policy_version=i,
            tokens_per_s=10.0,
            num_tokens=20 * i,
            num_lost_agents=i + 1,
        )
        for i in range(2)
    )
    stats = BufferStats(
        incarnation="i",
        policy_version=3,
        groups_per_step=1,
        max_staleness=1,
        staleness_bound=1,
        overdue=OverduePolicy.WAIT,
        books=Books(),
        generators=generators,
    )
    metrics = {**buffer_metrics(stats), **generator_metrics(stats)}
    assert math.isnan(metrics["generator/g0/tokens_per_s"]), "it has reported no token yet"
    assert metrics["generator/g1/tokens_per_s"] == 10.0
    assert metrics["generator/g1/policy_version"] == 1
    assert metrics["generator/num_lost_agents"] == 3


def test_staleness_is_a_distance():
    headers = [
        GroupHeader(
            group_id="g",
            prompt_index=0,
            environment="e",
            oldest_version=oldest,
            newest_version=newest,
            lengths=(1,),
            response_lengths=(1,),
            rewards=(0.0,),
        )
        for oldest, newest in ((5, 5), (3, 4), (4, 7), (6, 6))
    ]
    groups = {"0": 1, "1": 1, "2": 2, "3_4": 0, "5_8": 0, "9_plus": 0}
    assert staleness_metrics(headers, 5) == {
        "buffer/staleness_mean": 1.25,
        "buffer/staleness_max": 2,
        "buffer/staleness_min": -2,
        **{f"buffer/staleness_{bucket}/num_groups": n for bucket, n in groups.items()},
    }
    json.dumps(staleness_metrics(headers, 5))


class HangingTracker:
    def __init__(self) -> None:
        self.ends = threading.Event()
        self.logged: list[int] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.ends.wait()
        self.logged.append(step)

    def close(self) -> None:
        pass


def test_nobody_waits_for_a_tracker_that_hangs(tmp_path, caplog):
    hanging, file = HangingTracker(), tmp_path / "m.jsonl"
    trackers = Trackers(lines_in(file), [hanging])
    try:
        for step in (1, 2, 3):
            trackers.log({"reward/mean": 0.5}, step)
        trackers.flush()
        trackers.close(0.05)
        assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]
        assert "HangingTracker has not taken its last lines within 0.05 s" in caplog.text
    finally:
        hanging.ends.set()


def test_a_tracker_gets_every_line_in_order_before_it_is_closed(tmp_path):
    slow = HangingTracker()
    trackers = Trackers(lines_in(tmp_path / "m.jsonl"), [slow])
    for step in (1, 2, 3):
        trackers.log({}, step)
    slow.ends.set()
    trackers.close()
    assert slow.logged == [1, 2, 3]
