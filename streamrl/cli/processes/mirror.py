"""Mirrors the run's folder to an object store (`run.folder_mirror`), in every launch.

    MIRROR/NAME/    like runs/NAME, without what belongs to one machine: weights/, keys/, the
                    buffer's journal, and hidden files

A thread updates the mirror at each complete checkpoint and at the end, so no step waits. It copies
history and records first, then the checkpoints (the newest first, each manifest last), then
everything else; then it removes checkpoints that the folder no longer has. A failure is reported
and retried, and never ends the run.

Invariant: a checkpoint with a manifest in the mirror is complete, and the mirror has the lines of
all steps up to it and a history that contains it; an interrupted upload loses at most the newest
checkpoint. `Mirror.take` is called before a launch reads the folder: it fetches what the folder
lacks, and refuses if mirror and folder have diverged, since one of them would be lost.

Without the journal, what waited in the buffer is lost with the machine. A learner that attaches
with the books of its checkpoint opens those prompts again, so each is still trained once.
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from streamrl.checkpoints.find import PREFIX, STATE_FILE, list_checkpoints, newest
from streamrl.checkpoints.history import HISTORY_FILE, History
from streamrl.checkpoints.manifest import MANIFEST_FILE, verify
from streamrl.config import RunConfig
from streamrl.durable_files import held_by_links, new_folder, visible_files, write_file
from streamrl.errors import ConfigError, DamagedCheckpointError, FencedError, TransportError
from streamrl.object_store import StoreFolder
from streamrl.run_folder import MIRROR_FILE, MirrorStatus, held_run, move_aside, read_mirror

POLL_S, RETRY_S, END_S = 1.0, 5.0, 60.0
"""Seconds between looks, between tries, and for which a launch that has ended keeps trying."""
_SETTING = "run.folder_mirror"
_CHECKPOINTS = "checkpoints"
_HISTORY = f"{_CHECKPOINTS}/{HISTORY_FILE}"
_HELD = ".mirrored"
"""The folder of links that keeps the checkpoint that is being copied."""
_OF_A_MACHINE = frozenset({"weights", "keys", "buffer", "files", "launch.id", MIRROR_FILE})
_RECORDS = (".jsonl", ".json", ".yaml")


class _Tip(NamedTuple):
    """The newest checkpoint: the history that led to it, and its version."""

    history: History
    policy_version: int

    def holds(self, other: "_Tip") -> bool:
        """Whether the other tip is this one, or on the way to it."""
        is_before = other.policy_version <= self.policy_version
        return is_before and self.history.contains(other.history.learner_id, other.policy_version)


class Mirror:
    """The mirror of one run; `say` gets messages for a person. Methods wait for the store.

    Raises:
        ConfigError: the setting names no usable mirror.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        base = str(config.run.folder_mirror).rstrip("/")
        self._folder, self._say = config.run.path, say
        self.url = f"{base}/{config.run.name}"
        if base == (config.weights.store or "").rstrip("/"):
            raise ConfigError(f"{_SETTING}: was {base}, as weights.store: name another folder")
        if base.startswith("file://"):
            mirror = Path(self.url.removeprefix("file://"))
            one, other = mirror.resolve(), self._folder.resolve()
            if one.is_relative_to(other) or other.is_relative_to(one):
                raise ConfigError(
                    f"{_SETTING}: {mirror} would be in the run's folder {self._folder}, or that in "
                    "it: name a folder elsewhere"
                )
        self._base = StoreFolder(_SETTING, base)
        self._store = StoreFolder(_SETTING, self.url)
        self._sent: dict[str, object] = {}
        """What this launch has put into the mirror, by name: size and time, or the manifest."""
        self._histories: set[bytes | None] = {None}
        """Histories in the mirror that no other launch has written."""
        self._lock = threading.Lock()
        self._done: object = None
        self._whole_s: float | None = None
        self._retry_s, self._failure, self._is_taken = 0.0, "", False

    def require_writable(self) -> None:
        """Raise ConfigError if the mirror cannot be written."""
        self._base.require_writable()

    def take(self, *, resume: bool, new: bool) -> None:
        """Prepare for a launch with these flags: with `resume`, fetch the run if the mirror has
        more of it; with `new`, move the mirror's run aside.

        Raises:
            ConfigError: the mirror has a run and no flag says what to do with it, or it has
                diverged from the folder's.
            TransportError: the store does not answer.
        """
        names = self._store.names()
        if "metrics.jsonl" in names:
            if new:
                aside = f"{self.url}.{time.strftime('%Y%m%d-%H%M%S')}"
                self._store.move_to(aside)
                self._say(f"the run that was in {self.url} is in {aside}")
            elif not resume:
                raise ConfigError(
                    f"{_SETTING}: {self.url} holds a run already: --resume goes on with it, --new "
                    "moves it aside, or choose another run.name"
                )
        if resume:
            known = read_mirror(self._folder)
            self._whole_s = known.whole_s if known and known.url == self.url else None
            self.fetch(names)
        self._histories = {self._store.read(_HISTORY)}

    def fetch(self, names: set[str] | None = None, *, is_right: bool = False) -> None:
        """Replace the folder by the mirror's content, unless the folder has all of it; the old
        folder is moved aside. `is_right`: the mirror is right, so a folder that differs from it
        holds another run.

        Raises:
            ConfigError: mirror and folder have diverged, or the folder cannot be written.
            TransportError: the store does not answer.
        """
        names = self._store.names() if names is None else names
        theirs, ours = self._tip(names), _tip_of(self._folder)
        if theirs is None:
            if is_right and held_run(self._folder):
                move_aside(self._folder)
            return
        if ours is not None and ours.holds(theirs):
            return
        if ours is not None and not (is_right or theirs.holds(ours)):
            raise ConfigError(
                f"{_SETTING}: {self._folder} is at step {ours.policy_version} and {self.url} at "
                f"step {theirs.policy_version}, and neither goes on from the other: move the "
                "folder aside to go on with the mirror, or name another mirror to go on with the "
                "folder"
            )
        self._say(f"fetching the run at step {theirs.policy_version} from {self.url}")
        try:
            with new_folder(self._folder) as part:
                for name in _fetched(names):
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    self._store.get(name, part / name)
                if self._folder.exists():
                    move_aside(self._folder)
        except OSError as error:
            raise ConfigError(
                f"run.folder: cannot write {self._folder}: {error.strerror or error}"
            ) from error

    def _tip(self, names: set[str]) -> _Tip | None:
        """The newest complete checkpoint in the mirror that belongs to its history."""
        content = self._store.read(_HISTORY)
        if content is None:
            return None
        try:
            history = msgspec.json.decode(content, type=History)
            for folder in sorted(complete_checkpoints(names), reverse=True):
                state = json.loads(self._store.read(f"{_CHECKPOINTS}/{folder}/{STATE_FILE}") or "")
                tip = _Tip(msgspec.convert(state["history"], History), state["policy_version"])
                if history.contains(tip.history.learner_id, tip.policy_version):
                    return tip
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{_SETTING}: {self.url} cannot be read ({error}): name another mirror, or restore "
                "what somebody has changed there"
            ) from error
        return None

    def keep(self, stopping: threading.Event) -> None:
        """Update the mirror at each new checkpoint, until `stopping` is set."""
        while not stopping.wait(POLL_S) and not self._is_taken:
            if time.monotonic() >= self._retry_s and self._has_changed():
                self.is_brought_up_to_date()

    def _has_changed(self) -> bool:
        """Whether there is something to copy; also true if the run's folder cannot be read, which
        the next try reports."""
        try:
            return self._state() != self._done
        except (TransportError, OSError):
            return True

    def finish(self) -> None:
        """Update the mirror a last time. Waits at most END_S for a store that fails."""
        until_s = time.monotonic() + END_S
        while not self.is_brought_up_to_date() and time.monotonic() < until_s:
            time.sleep(RETRY_S)
        if self._failure:
            self._say(f"{self.url} lacks the end of the run, which {self._folder} has")
        elif self._sent and not self._is_taken:
            self._say(f"{self.url} has the run's folder")

    def is_brought_up_to_date(self) -> bool:
        """Update the mirror; return whether nothing is left to try. A failure is reported once."""
        with self._lock:
            try:
                state = self._state()
                if not self._is_taken:
                    self._bring_up_to_date()
            except FencedError as error:
                self._is_taken = True
                self._say(str(error))
                self._note(str(error))
            except (TransportError, OSError) as error:
                self._retry_s = time.monotonic() + RETRY_S
                if str(error) != self._failure:
                    self._failure = str(error)
                    self._say(f"{error}; the run goes on, and this is tried again")
                    self._note(self._failure)
                return False
            if self._failure and not self._is_taken:
                self._say(f"{self.url} is up to date again")
            self._failure, self._done = "", state
            if not self._is_taken:
                self._note()
            return True

    def _note(self, failure: str = "") -> None:
        """Write the mirror's state for `streamrl status`; on a full disk only that is lost."""
        noted = msgspec.json.encode(MirrorStatus(self.url, self._whole_s, failure))
        with suppress(OSError):
            write_file(self._folder / MIRROR_FILE, noted)

    def _state(self) -> object:
        """A value that changes when there is something new to copy."""
        files = [path / MANIFEST_FILE for path in list_checkpoints(self._folder)]
        return [(file, _stamp(file)) for file in (*files, self._folder / _HISTORY)]

    def _bring_up_to_date(self) -> None:
        there = self._store.read(_HISTORY)
        if there not in self._histories:
            raise FencedError(
                f"{_SETTING}: another launch goes on with the run in {self.url}; the folder of "
                "this one is not kept there any more"
            )
        if there is not None and not (self._folder / _HISTORY).exists():
            return
        # Checkpoints are listed before the records are read, so the records have the lines of their
        # steps.
        found = list_checkpoints(self._folder)
        self._put_records()
        # The newest first: the others may be deleted while it is copied.
        kept = [path.name for path in reversed(found) if self._put_checkpoint(path)]
        for file in self._files():
            if file.parent != self._folder or file.suffix not in _RECORDS:
                self._put(file, str(file.relative_to(self._folder)), may_change=True)
        if kept:
            self._remove_old({kept[0], *(path.name for path in list_checkpoints(self._folder))})
        if bool(kept) == bool(found):
            self._whole_s = time.time()

    def _put_records(self) -> None:
        """Copy history and records. Lines are cut only after a history is replaced, so these lines
        belong to this history or a later one."""
        while True:
            history = _content(self._folder / _HISTORY)
            stamps = {
                file: (_stamp(file), _content(file))
                for file in self._files()
                if file.parent == self._folder and file.suffix in _RECORDS
                if _stamp(file) != self._sent.get(file.name)
            }
            if history == _content(self._folder / _HISTORY):
                break
        if history is not None and self._sent.get(_HISTORY) != history:
            # Noted even if the write then seems to fail.
            self._histories.add(history)
            self._store.replace(_HISTORY, history)
            self._sent[_HISTORY], self._histories = history, {history}
        for file, (stamp, content) in stamps.items():
            if content is not None:
                self._store.replace(file.name, content)
                self._sent[file.name] = stamp

    def _put_checkpoint(self, path: Path) -> bool:
        """Copy a checkpoint; return whether it is there. One that is incomplete, or deleted here
        before it could be held, is not."""
        name = f"{_CHECKPOINTS}/{path.name}"
        try:
            if self._sent.get(name) == (path / MANIFEST_FILE).read_bytes():
                return True
            with held_by_links(path, self._folder / _HELD) as held:
                verify(held, contents=False)
                manifest = (held / MANIFEST_FILE).read_bytes()
                there = self._store.read(f"{name}/{MANIFEST_FILE}")
                if there != manifest:
                    if there is not None:
                        # It belongs to another history that had reached this version.
                        self._store.remove(f"{name}/{MANIFEST_FILE}")
                    for file in visible_files(held):
                        if file.name != MANIFEST_FILE:
                            self._put(file, f"{name}/{file.relative_to(held)}")
                    # A checkpoint that could not be held by links may have lost files meanwhile.
                    verify(held, contents=False)
                    self._store.replace(f"{name}/{MANIFEST_FILE}", manifest)
        except (DamagedCheckpointError, FileNotFoundError):
            return False
        self._sent[name] = manifest
        return True

    def _put(self, file: Path, name: str, *, may_change: bool = False) -> None:
        """Copy a file, unless it is there already. A file that may be written to is copied locally
        first, since libraries read its size before its content."""
        stamp = _stamp(file)
        if stamp is None or self._sent.get(name) == stamp:
            return
        if may_change:
            with tempfile.TemporaryDirectory(prefix="streamrl-mirror-") as folder:
                copy = Path(folder) / "copy"
                try:
                    shutil.copyfile(file, copy)
                except FileNotFoundError:
                    return
                self._store.put(copy, name, is_read=True)
        else:
            self._store.put(file, name)
        self._sent[name] = stamp

    def _remove_old(self, kept: set[str]) -> None:
        """Remove checkpoints that are not `kept`, their manifests first."""
        for name in sorted(self._store.names(), key=lambda name: not name.endswith(MANIFEST_FILE)):
            top, _, rest = name.partition("/")
            folder = rest.partition("/")[0]
            if top == _CHECKPOINTS and folder.startswith(PREFIX) and folder not in kept:
                self._store.remove(name)

    def _files(self) -> Iterator[Path]:
        """The files of the run's folder to copy, except checkpoints."""
        for path in visible_files(self._folder):
            top = path.relative_to(self._folder).parts[0]
            if top != _CHECKPOINTS and top not in _OF_A_MACHINE:
                yield path


def mirror_of(config: RunConfig, arguments: argparse.Namespace, console: Console) -> Mirror | None:
    """The mirror of a launch with these arguments, after `Mirror.take`; None without one.

    Raises:
        ConfigError, TransportError: see `Mirror.take`.
    """
    if config.run.folder_mirror is None:
        return None
    mirror = Mirror(config, lambda text: console.print(text, soft_wrap=True, highlight=False))
    mirror.take(resume=arguments.resume, new=arguments.new)
    return mirror


@contextmanager
def mirrored(mirror: Mirror | None) -> Iterator[None]:
    """Mirror the prepared folder during the block. At the end waits until everything is copied; an
    interrupt ends the wait."""
    if mirror is None:
        yield
        return
    stopping = threading.Event()
    thread = threading.Thread(target=mirror.keep, args=(stopping,), name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        mirror.finish()


def _tip_of(folder: Path) -> _Tip | None:
    try:
        checkpoint = newest(folder, contents=False)
    except ConfigError:
        return None
    return None if checkpoint is None else _Tip(checkpoint.history, checkpoint.policy_version)


def complete_checkpoints(names: Collection[str]) -> set[str]:
    """The folders of checkpoints that have a manifest, from the names of a run's files."""
    paths = [name.split("/") for name in names if name.endswith(f"/{MANIFEST_FILE}")]
    return {path[1] for path in paths if len(path) == 3 and path[0] == _CHECKPOINTS}


def _fetched(names: set[str]) -> Iterator[str]:
    """Yield the names of files to fetch: all but those of incomplete or abandoned checkpoints."""
    complete = complete_checkpoints(names)
    for name in sorted(names):
        parts = name.split("/")
        step = next((part for part in parts if part.startswith(PREFIX)), None)
        is_whole = step is None or (parts[0] == _CHECKPOINTS and step in complete)
        is_hidden = any(part.startswith(".") for part in parts)
        if is_whole and not is_hidden and parts[0] not in _OF_A_MACHINE:
            yield name


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
