"""Writing files and folders so that a crash or a full disk leaves the old or the new state.

Used for a run's small files, checkpoints, journal and secrets. Imports nothing from StreamRL.
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
    """Write the whole file durably; a crash or a full disk leaves the old content. A private file
    is readable by its owner only. Raises OSError if it cannot be written."""
    # Daemons in different containers may write the same file with the same process id.
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
    """An `opener` for a new file that only its owner can read. A file that is already there is
    removed, never reused; with mode "x" it raises FileExistsError."""
    if not flags & os.O_EXCL:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def visible_files(folder: Path) -> Iterator[Path]:
    """The files below a folder that others write to and delete from, without links and hidden
    files (files being written are hidden). Files that vanish meanwhile are skipped."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in sorted(names) if not name.startswith(".")):
            with suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                yield path


@contextmanager
def held_by_links(folder: Path, links: Path) -> Iterator[Path]:
    """For a block that reads the folder: gives `links`, a folder of hard links that stays whole if
    somebody deletes the original meanwhile, or the folder itself if links are not possible."""
    try:
        yield links if link_folder(folder, links) else folder
    finally:
        shutil.rmtree(links, ignore_errors=True)


def link_folder(folder: Path, links: Path) -> bool:
    """Replace `links` by a folder of hard links to the folder's files; False if not possible."""
    shutil.rmtree(links, ignore_errors=True)
    try:
        shutil.copytree(folder, links, copy_function=os.link)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return False
    return True


def share_weights(folder: Path) -> None:
    """Make the weights below a folder readable for those who may read the folder: safetensors
    creates files that only their owner can read, whatever the umask."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        # Somebody else may own it, and some file systems have no modes.
        with suppress(OSError):
            file.chmod(mode)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """For a block that writes a new folder: the folder gets its name at the end of the block, and
    is removed if the block fails. Remains of a killed process are removed first. Weights in it are
    made readable as by `share_weights`.

    Raises:
        OSError: it cannot be made, the name is taken, or another process is writing it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    is_taken = BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
    # Until it is locked, it may be renamed at any time, and a new one may take its place.
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
    """Lock the open file or folder for this process; False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some file systems have no locks.
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
