"""Watches the other ranks of a learner: if one ends or freezes, all end.

Every BEAT_S, a thread of each rank sets a heartbeat in the process group's store and reads those of
the others. A rank on this machine is lost as soon as its process has ended, any other when its
heartbeat has not changed for `deadline_s`.

Invariant: once a rank is lost, this process ends within GRACE_S with an error that names it, even
if its compute thread hangs in a collective operation.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from streamrl.errors import EXIT_UNREACHABLE, TransportError, leave_record

log = logging.getLogger(__name__)

BEAT_S, GRACE_S = 0.5, 5.0
_PARTED = "parted"
_OF_COLLECTIVES = (
    RuntimeError,
    dist.DistError,
    dist.DistBackendError,
    dist.DistNetworkError,
    dist.DistStoreError,
)


class Liveness:
    """Watches the ranks that share a store; without a store there are none."""

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        deadline_s: float = 60.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._deadline_s = deadline_s
        # By rank: its last heartbeat, and when this process first saw it, in seconds.
        self._seen: dict[int, tuple[str, float]] = {}
        self._beat_s = time.monotonic()
        self._lost: TransportError | None = None
        self._parting, self._changed = threading.Event(), threading.Event()
        self._notify: Callable[[], object] = lambda: None
        self._is_ordered = False
        self._on_order: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Set a first heartbeat, so that even a rank that ends at once is missed."""
        if self._store is not None and self._others:
            self._store.set(_key(self._rank), _beat_of(0))
            threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def stop(self) -> None:
        """From now on the others do not miss this rank, nor this rank the others."""
        self._parting.set()
        if self._store is not None and self._others and self._lost is None:
            with suppress(RuntimeError):
                self._store.set(_key(self._rank), _PARTED)

    def order(self) -> None:
        """Ask the first rank to end the learner; it sees this within two heartbeats."""
        self._is_ordered = True

    def on_order(self, end: Callable[[], object]) -> None:
        """On the first rank: call `end` in this event loop when another rank gives that order."""
        loop = asyncio.get_running_loop()
        self._on_order = lambda: loop.call_soon_threadsafe(end)

    async def watch(self) -> None:
        """Waits until a rank is lost and raises a TransportError that names it; ends when
        cancelled."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(changed.set)
        if self._lost is None:
            await changed.wait()
        assert self._lost is not None, "nothing else sets the event"
        raise self._lost

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Wraps code that may fail because a rank is lost, and raises the error that names the rank
        instead. After a failure it waits until the lost rank is known, up to the deadline."""
        try:
            yield
        except (RuntimeError, TransportError) as error:
            # Errors that our own code raised do not count.
            is_of_collective = isinstance(error, TransportError) or type(error) in _OF_COLLECTIVES
            if self._others and is_of_collective and not self._parting.is_set():
                self._changed.wait(self._deadline_s + 2 * BEAT_S)
            if self._lost is None:
                raise
            raise self._lost from error

    def _run(self) -> None:
        """Runs until this rank parts, or until GRACE_S after another rank is lost."""
        count = 0
        while not self._parting.wait(BEAT_S):
            count += 1
            try:
                sentence = self._beat(count)
            except RuntimeError as error:
                sentence = f"the store of the learner's ranks does not answer: {error}"
            if sentence and not self._parting.is_set():
                self._end(sentence)
                return

    def _beat(self, count: int) -> str:
        """Set this rank's heartbeat and read the others'; why one of them is lost, or ""."""
        assert self._store is not None, "without a store nothing beats"
        self._store.set(_key(self._rank), _beat_of(count))
        before_s, self._beat_s = self._beat_s, time.monotonic()
        if self._beat_s - before_s > self._deadline_s / 2:
            # This process stood still, and so may the others have, e.g. suspended by Slurm.
            self._seen = {}
        if self._is_ordered:
            self._store.set(_key("end"), str(self._rank))
        elif self._rank == 0 and self._store.check([_key("end")]):
            self._on_order()
        keys = [_key(other) for other in self._others]
        # A rank that has just joined has no heartbeat yet, and reading would block.
        if not self._seen and not self._store.check(keys):
            return ""
        beats = (value.decode() for value in self._store.multi_get(keys))
        sentences = [self._judge(*pair) for pair in zip(self._others, beats, strict=True)]
        return next((sentence for sentence in sentences if sentence), "")

    def _judge(self, rank: int, beat: str) -> str:
        now_s = time.monotonic()
        last, since_s = self._seen.get(rank, ("", now_s))
        if last != beat:
            since_s = now_s
            self._seen[rank] = (beat, now_s)
        if beat == _PARTED:
            return ""
        host, process, _ = beat.rsplit(maxsplit=2) if beat.count(" ") == 2 else ("", "", "")
        if host and host == this_pid_namespace() and not _exists(int(process)):
            return f"rank {rank} of the learner (process {process}) has ended"
        if now_s - since_s > self._deadline_s:
            return f"rank {rank} of the learner has not reported for {now_s - since_s:.0f} s"
        return ""

    def _end(self, sentence: str) -> None:
        self._lost = TransportError(sentence)
        self._changed.set()
        self._notify()
        # The daemon ends by itself, unless one of its threads waits for the lost rank.
        time.sleep(GRACE_S)
        log.critical("%s; ending at once", sentence)
        leave_record(self._lost)
        os._exit(EXIT_UNREACHABLE)


def this_pid_namespace() -> str:
    """Equal for processes that see each other's process ids; "" if the system does not say."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _beat_of(count: int) -> str:
    """This process's heartbeat."""
    return f"{this_pid_namespace()} {os.getpid()} {count}"


def _key(rank: int | str) -> str:
    """A key for this start of the ranks only: torchrun may start them again."""
    return f"streamrl/beat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
