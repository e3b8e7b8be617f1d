"""Files and folders that a crash or a full disk leaves as they were, or as they are to be.

For the small files of a run, its checkpoints and its journal, and those of its secrets. Imports
nothing of StreamRL.
"""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_file(path: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Write the file whole and durably: a crash or a full disk leaves what was there before. A
    private one can be read by its owner alone. Raises OSError if it is not written."""
    # Several daemons of a run may write the same file, in containers with one id of process.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "wb", opener=open_private if is_private else None) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def open_private(path: str, flags: int) -> int:
    """The `opener` of a new file that its owner alone can read, never one that somebody has put
    there: that one is removed; with mode "x" it is a FileExistsError."""
    if not flags & os.O_EXCL:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def visible_files(folder: Path) -> Iterator[Path]:
    """Those below a folder that others write to and delete from: no link, and nothing hidden, as
    what is being written is. What is deleted meanwhile is left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in sorted(names) if not name.startswith(".")):
            with suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                yield path


@contextmanager
def held_by_links(folder: Path, links: Path) -> Iterator[Path]:
    """The folder by links of its own, for the block: `links`, which stays whole where somebody
    deletes the folder meanwhile; the folder itself where links cannot be had."""
    try:
        yield links if link_folder(folder, links) else folder
    finally:
        shutil.rmtree(links, ignore_errors=True)


def link_folder(folder: Path, links: Path) -> bool:
    """Whether `links` now has links to the folder's files, in the place of whatever it had."""
    shutil.rmtree(links, ignore_errors=True)
    try:
        shutil.copytree(folder, links, copy_function=os.link)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return False
    return True


def share_weights(folder: Path) -> None:
    """Let those read the weights in a folder, at any depth, who may read the folder: safetensors
    makes files that their owner alone can read, whatever the umask."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        # Others may own it, and some file systems have no modes.
        with suppress(OSError):
            file.chmod(mode)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write, which gets its name at the end of the block; none if that fails. What a
    killed process has left of it is removed. Its weights are shared.

    Raises:
        OSError: it cannot be made, there is one of that name, or another process is writing it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    is_taken = BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
    # It may have its name at any time before it is locked, and a new one may stand in its place.
    try:
        held = os.open(unfinished, os.O_RDONLY)
    except FileNotFoundError:
        raise is_taken from None
    try:
        if not is_locked(held) or not _is_at(unfinished, held):
            raise is_taken
        for left in os.scandir(unfinished):
            shutil.rmtree(left) if left.is_dir(follow_symlinks=False) else os.unlink(left)
        try:
            yield unfinished
            share_weights(unfinished)
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    finally:
        os.close(held)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def is_locked(descriptor: int) -> bool:
    """Locks the open file or folder for this process, unless another one holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some file systems have no locks.
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
