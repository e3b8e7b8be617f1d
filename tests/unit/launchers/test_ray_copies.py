"""What a driver has of a node's files when they have changed in any way between two looks."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from streamrl.checkpoints.manifest import record_files, write_manifest
from streamrl.cli.launchers.ray.cluster import Copies, Place
from streamrl.cli.launchers.ray.supervisor import Supervisor
from streamrl.durable_files import visible_files


class Node:
    """The learner's, as a `Place`: its supervisor answers from a folder."""

    def __init__(self, folder: Path) -> None:
        self.is_ready, self.found = True, {"shares_folder": False}
        self.bundle = SimpleNamespace(name="learner")
        self.folder, self.before_read = folder, lambda: None
        supervisor = Supervisor()
        supervisor._folder = folder

        async def read(path: str, offset: int, size: int) -> bytes:
            self.before_read()
            return await supervisor.read(path, offset, size)

        self.actor = SimpleNamespace(
            files=SimpleNamespace(remote=supervisor.files), read=SimpleNamespace(remote=read)
        )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def save(self, step: int, text: str = "weights") -> None:
        path = self.folder / "checkpoints" / f"step-{step:08}"
        for name in ("model.safetensors", "shards/rank-0"):
            self.write(str((path / name).relative_to(self.folder)), f"{text} of {name}")
        write_manifest(path, record_files(path, [f for f in path.rglob("*") if f.is_file()]))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr("streamrl.cli.launchers.ray.supervisor._start_watcher", lambda mark: -1)
    return Node(tmp_path / "node")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def copies(node: Node, here: Path) -> Copies:
    return Copies(here, [cast(Place, node)])


@pytest.mark.parametrize(
    "later",
    ["step 1\nstep 2\nstep 3\n", "step 1\n", "step 1\nSTEP 2\nSTEP 3\n"],
    ids=["longer", "cut", "cut and longer"],
)
async def test_lines_are_those_of_the_node(copies, node, here, later):
    node.write("metrics.jsonl", "step 1\nstep 2\n")
    await copies.bring()
    node.write("metrics.jsonl", later)
    await copies.bring()
    assert (here / "metrics.jsonl").read_text() == later


async def test_a_checkpoint_goes_that_the_node_has_deleted_before_the_first_look(
    copies, node, here
):
    for step in (1, 2, 3):
        folder = here / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    node.write("metrics.jsonl", "step 1\n")
    await copies.bring()
    assert len(list((here / "checkpoints").iterdir())) == 3, "the node has none that is newer"
    for step in (2, 3):
        node.write(f"checkpoints/step-{step:08}/manifest.json", "{}")
    await copies.bring()
    names = sorted(path.name for path in (here / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


async def test_a_checkpoint_that_its_node_deletes_while_it_is_copied_arrives_whole(
    copies, node, here, tmp_path
):
    def saves_another() -> None:
        node.before_read = lambda: None
        shutil.rmtree(node.folder / "checkpoints" / "step-00000001")
        shutil.rmtree(node.folder / "checkpoints" / "step-00000002")
        node.save(3)

    node.save(1)
    node.save(2)
    expected = contents(node.folder / "checkpoints" / "step-00000002")
    node.before_read = saves_another
    (here / "checkpoints" / "step-00000000").mkdir(parents=True)
    await copies.bring()
    assert contents(here / "checkpoints" / "step-00000002") == expected
    assert contents(here / "checkpoints" / "step-00000001") == {}, "no part of a file"
    # The learner has gone back, and come to the same step again.
    shutil.rmtree(node.folder / "checkpoints" / "step-00000003")
    node.save(3, "other weights")
    await copies.bring()
    expected = contents(node.folder / "checkpoints" / "step-00000003")
    assert contents(here / "checkpoints") == {f"step-00000003/{k}": v for k, v in expected.items()}


async def test_the_last_whole_checkpoint_stays_until_the_next_one_is_here(copies, node, here):
    def is_gone() -> None:
        shutil.rmtree(node.folder, ignore_errors=True)

    node.save(1)
    await copies.bring()
    node.save(2)
    shutil.rmtree(node.folder / "checkpoints" / "step-00000001")
    expected = contents(here / "checkpoints" / "step-00000001")
    node.before_read = is_gone
    await copies.bring()
    assert contents(here / "checkpoints") == {f"step-00000001/{k}": v for k, v in expected.items()}


def test_a_folder_that_is_deleted_while_files_are_listed_is_left_out(tmp_path: Path):
    for name in ("a/one", "b/two", "c/.hidden", ".d/three"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b" / "two")
    listed = visible_files(tmp_path)
    assert next(listed) == tmp_path / "a" / "one"
    shutil.rmtree(tmp_path / "b")
    assert list(listed) == []
