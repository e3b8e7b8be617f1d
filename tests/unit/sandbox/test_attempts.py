"""What a program can do to others, seen under every isolation and as several users.

Root's programs become a user of their own where that user can read Python and the folder; where it
cannot, they stay root without capabilities. Anybody else's are the daemon's user.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from actors.sandbox.isolation import KINDS
from actors.sandbox.privileges import can_be_read_by_others
from tests.unit.sandbox.attempts import ATTEMPTS, Attempt

ROOT = Path(__file__).parents[3]
USERS = ("own", "root in a private folder", "nobody")
_NOBODY = 65534


def observed(isolation: str, user: str, folder: Path) -> dict[str, Any]:
    """What the observer said; skips where this machine cannot run it."""
    said = _observed(isolation, user, folder)
    if "lacks" in said:
        pytest.skip(said["lacks"])
    return said


@cache
def _observed(isolation: str, user: str, folder: Path) -> dict[str, Any]:
    python, before = sys.executable, []
    if user == "root in a private folder":
        folder.chmod(0o700)
    elif os.getuid() == 0:
        folder.chmod(0o777)
        python = _python_of_others()
    if user != "own" and os.getuid() != 0:
        return {"lacks": "only root can become another user"}
    if not python:
        return {"lacks": f"other users can read neither this Python nor {ROOT}"}
    if user == "nobody":
        before = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    observer = str(Path(__file__).with_name("observer.py"))
    done = subprocess.run(
        [*before, python, "-B", observer, isolation],
        capture_output=True,
        text=True,
        env={"TMPDIR": str(folder), "PATH": os.defpath},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _python_of_others() -> str:
    """One that any user can run: this one, or the system's; "" if there is none."""
    old = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in map(Path, (sys.executable, "/usr/bin/python3")):
        folders = (ROOT, python.parent, python.resolve().parent)
        if all(map(_is_open, folders)) and not subprocess.run([python, "-c", old]).returncode:
            return str(python)
    return ""


def _is_open(folder: Path) -> bool:
    return folder.is_dir() and can_be_read_by_others(folder)


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    """A folder for temporary files for each user, below one that all may enter."""
    with tempfile.TemporaryDirectory(prefix="attempts-") as name:
        Path(name).chmod(0o755)
        for user in USERS:
            Path(name, user).mkdir()
        yield Path(name)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", KINDS)
class TestAttempts:
    @pytest.mark.parametrize(
        ("number", "attempt"), [*enumerate(ATTEMPTS)], ids=[attempt.what for attempt in ATTEMPTS]
    )
    def test_what_becomes_of_it(
        self, isolation: str, user: str, folders: Path, number: int, attempt: Attempt
    ) -> None:
        outcomes = observed(isolation, user, folders / user)["outcomes"]
        assert outcomes[number] == getattr(attempt, isolation)

    def test_the_other_process_is_what_it_was(
        self, isolation: str, user: str, folders: Path
    ) -> None:
        said = observed(isolation, user, folders / user)
        assert said["after"] == said["before"]

    def test_the_user(self, isolation: str, user: str, folders: Path) -> None:
        seen = observed(isolation, user, folders / user)["user"]
        match user:
            case "nobody":
                assert seen == _NOBODY
            case "own" if os.getuid() == 0:
                assert seen not in (0, _NOBODY)
            case "own":
                assert seen == os.getuid()
            case _:
                assert (seen == 0) == (isolation == "landlock" or not _is_open_here())


def _is_open_here() -> bool:
    """With namespaces what is above Python is open to all."""
    return Path(sys.executable).resolve().parent.stat().st_mode & 0o005 == 0o005


@pytest.mark.skipif(os.getuid() != 0, reason="only root stops being root")
def test_what_is_the_machines_stays_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.devnull)
    owner = os.stat(os.devnull).st_uid
    code = (
        "import os, sys, pathlib\n"
        "from actors.sandbox.privileges import stop_being_root\n"
        "stop_being_root(pathlib.Path(sys.argv[1]), 1)\n"
        "print(os.getuid(), os.fstat(1).st_uid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    uid, owner_of_pipe = map(int, done.stdout.split())
    assert uid == owner_of_pipe == tmp_path.stat().st_uid != 0
    assert os.stat(os.devnull).st_uid == owner
