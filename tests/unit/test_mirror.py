"""`run.folder_mirror`: what an upload leaves wherever it breaks off, and what is fetched of it."""

import json
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from streamrl.checkpoints.find import FORMAT, STATE_FILE, list_checkpoints, newest, path_of
from streamrl.checkpoints.history import History, HistorySegment, write_history
from streamrl.checkpoints.manifest import record_files, write_manifest
from streamrl.cli.check.settings import check_folder
from streamrl.cli.processes import mirror as mirror_module
from streamrl.cli.processes.mirror import Mirror, mirror_of, mirrored
from streamrl.cli.status import RunStatus, as_json, rows
from streamrl.config import RunConfig
from streamrl.diagnosis import Reading
from streamrl.errors import ConfigError, TransportError
from streamrl.types import Books

FIRST = History(learner_id="first")
SECOND = History(learner_id="second", segments=(HistorySegment("first", 3),))


def config_in(folder: Path) -> RunConfig:
    sections = {"model": {"path": "none"}, "data": {"source": "copy"}}
    return RunConfig.model_validate({"run": {"name": "run", "folder": folder}, **sections})


class Machine:
    """One that launches the run; each has a folder of its own, and all have the mirror."""

    def __init__(self, folder: Path, url: str) -> None:
        config = config_in(folder)
        # A store without a disk has no name that a configuration may have.
        run = config.run.model_copy(update={"folder_mirror": url})
        self.config = config.model_copy(update={"run": run})
        self.folder, self.said = config.run.path, list[str]()
        self.mirror = Mirror(self.config, self.said.append)

    def begin(self, history: History) -> None:
        write_history(self.folder / "checkpoints", history)

    def save(self, version: int, history: History = FIRST, weights: str = "weights") -> Path:
        """The lines of the steps, then a checkpoint, as a learner does."""
        lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, version + 1))
        for name in ("metrics.jsonl", "trained.jsonl"):
            (self.folder / name).write_text(lines)
        path = path_of(self.folder, version)
        shutil.rmtree(path, ignore_errors=True)
        (path / "shards").mkdir(parents=True)
        state = {
            "format": FORMAT,
            "policy_version": version,
            "books": msgspec.to_builtins(Books(), str_keys=True),
            "history": msgspec.to_builtins(history),
        }
        (path / STATE_FILE).write_text(json.dumps(state))
        (path / "model.safetensors").write_text(weights)
        (path / "shards" / "rank-00000.safetensors").write_text(weights * version)
        files = [file for file in path.rglob("*") if file.is_file()]
        write_manifest(path, record_files(path, files))
        return path

    def bring(self) -> bool:
        return self.mirror.is_brought_up_to_date()

    @property
    def step(self) -> int:
        found = newest(self.folder)
        return 0 if found is None else found.policy_version


@pytest.fixture(params=["file", "memory"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Machine]:
    """Of this name."""
    url = f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}"
    return lambda name: Machine(tmp_path / name, url)


def test_another_machine_has_the_run_and_what_is_of_one_machine_stays_there(machine):
    one, other = machine("one"), machine("other")
    one.begin(FIRST)
    one.save(2)
    one.save(3)
    for name in ("logs/learner.log", "config.yaml", "samples/a.jsonl", "abandoned/1/step-9/x"):
        (one.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (one.folder / name).write_text(name)
    for name in ("keys/server.secret", "buffer/journal.sqlite", "weights/x", ".hidden"):
        (one.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (one.folder / name).write_text("secret")
    assert one.bring()
    assert one.said == []
    other.mirror.take(resume=True, new=False)
    assert other.step == 3
    files = {str(p.relative_to(other.folder)) for p in other.folder.rglob("*") if p.is_file()}
    assert {"logs/learner.log", "config.yaml", "samples/a.jsonl", "trained.jsonl"} <= files
    assert not [name for name in files if "x" in name.split("/") or name.startswith((".", "keys"))]
    assert not (other.folder / "buffer").exists()
    other.said.clear()
    other.mirror.take(resume=True, new=False)
    assert other.said == []


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_there_whole(machine, monkeypatch):
    one, other = machine("one"), machine("other")
    one.begin(FIRST)
    one.save(1)
    put = one.mirror._store.put

    def slowly(file: Path, name: str, **given: Any) -> None:
        # The learner has saved others meanwhile, and keeps those alone.
        if path_of(one.folder, 1).exists():
            shutil.rmtree(path_of(one.folder, 1))
            one.save(2)
        put(file, name, **given)

    monkeypatch.setattr(one.mirror._store, "put", slowly)
    assert one.bring()
    other.mirror.take(resume=True, new=False)
    assert other.step == 1
    assert [path.name for path in list_checkpoints(one.folder)] == ["step-00000002"]
    assert one.bring()
    names = one.mirror._store.names()
    assert {name.split("/")[1] for name in names if "/step-" in name} == {"step-00000002"}
    assert not (one.folder / ".mirrored").exists()


def test_where_links_cannot_be_had_one_that_loses_files_meanwhile_gets_no_manifest(
    machine, monkeypatch
):
    one = machine("one")
    one.begin(FIRST)
    one.save(1)
    put = one.mirror._store.put

    def no_link(*paths: Any, **given: Any) -> None:
        raise PermissionError("no links here")

    def slowly(file: Path, name: str, **given: Any) -> None:
        put(file, name, **given)
        (path_of(one.folder, 1) / "shards" / "rank-00000.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr("streamrl.durable_files.os.link", no_link)
    monkeypatch.setattr(one.mirror._store, "put", slowly)
    one.bring()
    assert not [name for name in one.mirror._store.names() if name.endswith("manifest.json")]
    monkeypatch.setattr(one.mirror._store, "put", put)
    one.save(2)
    assert one.bring()
    assert [name for name in one.mirror._store.names() if name.endswith("2/manifest.json")]


def test_only_what_has_changed_is_taken_there_and_what_is_deleted_goes(machine, monkeypatch):
    one = machine("one")
    one.begin(FIRST)
    one.save(1)
    one.save(2)
    assert one.bring()
    names: list[str] = []
    put, replace = one.mirror._store.put, one.mirror._store.replace
    monkeypatch.setattr(
        one.mirror._store, "put", lambda file, name, **k: (names.append(name), put(file, name, **k))
    )
    monkeypatch.setattr(
        one.mirror._store, "replace", lambda name, c: (names.append(name), replace(name, c))
    )
    assert one.bring()
    assert names == []
    one.save(3)
    shutil.rmtree(path_of(one.folder, 1))
    assert one.bring()
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints")} == {
        "step-00000003"
    }
    assert names[-1].endswith("step-00000003/manifest.json")
    assert not [name for name in one.mirror._store.names() if "step-00000001" in name]
    assert not list(one.folder.parents[1].glob("store/run/checkpoints/step-00000001"))


@pytest.mark.parametrize("at", range(1, 28))
def test_wherever_an_upload_breaks_off_a_whole_checkpoint_with_its_lines_is_left(
    machine, monkeypatch, at
):
    """Of a history that has come to a version of the one before; it is then tried again."""
    one, other = machine("one"), machine("other")
    one.begin(FIRST)
    one.save(3)
    one.save(4)
    assert one.bring()
    one.begin(SECOND)
    shutil.rmtree(path_of(one.folder, 4))
    one.save(4, SECOND, "other")
    one.save(5, SECOND, "other")
    calls: list[Any] = []
    real = one.mirror._store._do

    def failing(call: Callable[[], Any]) -> Any:
        calls.append(call)
        if len(calls) == at:
            raise TransportError("reset by peer")
        return real(call)

    monkeypatch.setattr(one.mirror._store, "_do", failing)
    is_done = one.bring()
    monkeypatch.setattr(one.mirror._store, "_do", real)
    other.mirror.take(resume=True, new=False)
    assert other.step in (3, 4, 5)
    content = path_of(other.folder, other.step) / "model.safetensors"
    is_second = newest(other.folder).history == SECOND
    assert content.read_text() == ("other" if is_second else "weights")
    steps = [json.loads(line)["step"] for line in (other.folder / "trained.jsonl").open()]
    assert steps[: other.step] == list(range(1, other.step + 1))
    assert one.bring()
    assert is_done or one.said == [
        "reset by peer; the run goes on, and this is tried again",
        f"{one.mirror.url} is up to date again",
    ]
    last = machine("last")
    last.mirror.take(resume=True, new=False)
    assert last.step == 5
    assert newest(last.folder).history == SECOND


def test_the_folder_that_has_more_is_kept_and_one_that_has_less_is_set_aside(machine):
    one, other = machine("one"), machine("other")
    one.begin(FIRST)
    one.save(3)
    assert one.bring()
    other.mirror.take(resume=True, new=False)
    other.begin(SECOND)
    other.save(5, SECOND)
    other.mirror.take(resume=True, new=False)
    assert other.step == 5
    assert other.bring()
    one.mirror.take(resume=True, new=False)
    assert one.step == 5
    (aside,) = one.folder.parent.glob("run.*")
    assert newest(aside).policy_version == 3


def go_on_apart(one, other) -> None:
    """Both from step 3: the one to step 6, unsent, and the other to step 4, which is sent."""
    one.begin(FIRST)
    one.save(3)
    assert one.bring()
    other.mirror.take(resume=True, new=False)
    other.begin(SECOND)
    other.save(4, SECOND)
    assert other.bring()
    one.save(6)


def test_two_that_have_gone_on_apart_are_refused_with_what_to_do(machine):
    one, other = machine("one"), machine("other")
    go_on_apart(one, other)
    with pytest.raises(ConfigError, match=r"step 6 and .* step 4, .*move the folder aside to go"):
        one.mirror.take(resume=True, new=False)
    assert one.step == 6
    one.mirror.fetch(is_right=True)
    assert one.step == 4


def test_a_launch_that_was_overtaken_writes_no_more(machine):
    one, other = machine("one"), machine("other")
    go_on_apart(one, other)
    assert one.bring()
    assert "another launch goes on with the run" in one.said[-1]
    assert not [name for name in one.mirror._store.names() if "step-00000006" in name]


def test_a_run_in_the_mirror_needs_a_flag_and_new_sets_it_aside(machine):
    one, other = machine("one"), machine("other")
    one.begin(FIRST)
    one.save(3)
    assert one.bring()
    with pytest.raises(ConfigError, match=r"holds a run already: --resume .* --new"):
        other.mirror.take(resume=False, new=False)
    other.folder.mkdir(parents=True)
    (other.folder / "mirror.json").write_text(f'{{"url": "{other.mirror.url}", "whole_s": 1.0}}')
    other.mirror.take(resume=False, new=True)
    assert other.mirror._whole_s is None
    assert f"the run that was in {other.mirror.url} is in" in other.said[-1]
    assert other.mirror._store.names() == set()
    other.begin(History(learner_id="new"))
    other.save(1, History(learner_id="new"))
    assert other.bring()


def test_a_store_that_is_gone_ends_no_run_and_is_told_once(machine, monkeypatch):
    for name in ("POLL_S", "RETRY_S", "END_S"):
        monkeypatch.setattr(mirror_module, name, 0.01)
    one = machine("one")
    one.begin(FIRST)

    def refuse(_: Callable[[], Any]) -> Any:
        raise TransportError("gone")

    monkeypatch.setattr(one.mirror._store, "_do", refuse)
    with mirrored(one.mirror):
        one.save(1)
    assert one.said == [
        "gone; the run goes on, and this is tried again",
        f"{one.mirror.url} lacks the end of the run, which {one.folder} has",
    ]


def test_a_status_says_when_all_was_last_there_and_what_fails_since(machine, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)
    one = machine("one")
    assert of_status(one) == f"{one.config.run.folder_mirror} has nothing of the run yet"
    one.begin(FIRST)
    one.save(1)

    def refuse() -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(one.mirror, "_put_records", refuse)
        assert not one.bring()
    assert of_status(one) == f"{one.mirror.url} not whole yet; gone"
    assert one.bring()
    assert of_status(one) == f"{one.mirror.url} whole 0 s ago"
    again = Machine(one.config.run.folder, one.config.run.folder_mirror)
    again.mirror.take(resume=True, new=False)
    monkeypatch.setattr(again.mirror, "_put_records", refuse)
    assert not again.bring()
    now_s += 300
    assert of_status(one) == f"{one.mirror.url} whole 5 min ago; gone"


def of_status(machine: Machine) -> str:
    reading = Reading(stall_s=60.0, stats=None, unreachable="")
    status = RunStatus("run", reading, (), config=machine.config)
    noted = as_json(status)["mirror"]
    assert noted is None or noted["url"] == machine.mirror.url
    return dict(rows(status))["mirror"]


def test_a_bucket_that_is_not_there_is_told_by_a_check(tmp_path, monkeypatch):
    one = Machine(tmp_path, "memory://bucket/x")

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", missing)
    (problem,) = [f for f in check_folder(one.config) if f.severity == "problem"]
    assert "run.folder_mirror memory://bucket/x: The specified bucket does not" in str(problem)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///proc/none", r"run\.folder_mirror file:///proc/none: .*has to be writable"),
        ("s3://bucket/x", r"run\.folder_mirror: s3:// needs s3fs.*pip install 'streamrl\[s3\]'"),
        ("file://{folder}", r"run\.folder_mirror: .* would be in the run's folder"),
        ("memory://store", r"run\.folder_mirror: was memory://store, as weights\.store"),
    ],
)
def test_a_mirror_that_cannot_be_one_is_refused_by_check_and_launch(
    tmp_path, monkeypatch, url, sentence
):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    config = Machine(tmp_path, "memory://elsewhere").config
    run = config.run.model_copy(update={"folder_mirror": url.format(folder=tmp_path)})
    weights = config.weights.model_copy(update={"store": "memory://store/"})
    config = config.model_copy(update={"run": run, "weights": weights})
    (problem,) = [f for f in check_folder(config) if f.severity == "problem"]
    assert re.search(sentence, str(problem))
    if "writable" not in sentence:
        with pytest.raises(ConfigError, match=sentence):
            mirror_of(config, Namespace(resume=False, new=False), Console())


def test_a_run_without_a_mirror_has_none(tmp_path):
    config = config_in(tmp_path)
    assert mirror_of(config, Namespace(resume=True, new=False), Console()) is None
    with mirrored(None):
        assert list_checkpoints(config.run.path) == []
