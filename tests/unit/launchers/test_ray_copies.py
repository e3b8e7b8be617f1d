"""What a driver has of a node's files when they have changed in any way between two looks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamrl.cli.launchers.ray.cluster import Copies, Place
from streamrl.cli.launchers.ray.supervisor import _files
from streamrl.durable_files import visible_files


class Node:
    """The learner's, as a `Place`: it answers from a folder."""

    def __init__(self, folder: Path) -> None:
        self.is_ready, self.found = True, {"shares_folder": False}
        self.bundle = SimpleNamespace(name="learner")
        self._folder = folder
        self.actor = SimpleNamespace(files=_remote(self._list), read=_remote(self._read))

    def _list(self, prefix: str) -> dict[str, tuple[int, int]]:
        return _files(self._folder, prefix)

    def _read(self, path: str, offset: int, size: int) -> bytes:
        return (self._folder / path).read_bytes()[offset : offset + size]

    def write(self, name: str, text: str) -> None:
        (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_text(text)


def _remote(call: Callable[..., Any]) -> SimpleNamespace:
    async def remote(*arguments: Any) -> Any:
        return call(*arguments)

    return SimpleNamespace(remote=remote)


@pytest.fixture
def node(tmp_path: Path) -> Node:
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


def test_a_folder_that_is_deleted_while_files_are_listed_is_left_out(tmp_path: Path):
    for name in ("a/one", "b/two", "c/.hidden", ".d/three"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b" / "two")
    listed = visible_files(tmp_path)
    assert next(listed) == tmp_path / "a" / "one"
    shutil.rmtree(tmp_path / "b")
    assert list(listed) == []
