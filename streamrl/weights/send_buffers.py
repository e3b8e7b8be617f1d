"""Buffers that the learner writes a version into and the sender sends it from, without a wait.

The buffers are in memory that other processes can map, and each has a stamp, always in host memory.
A write sets a random stamp before the first byte it changes, and receivers get the stamp only after
the last one. So a receiver that still finds its stamp after copying everything has that version,
however long it was suspended meanwhile: a seqlock of one store. Both ends take a lock between stamp
and bytes, which keeps their order on any processor: the writer its own, the reader the
interpreter's after a copy without it.
"""

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamrl.types import CudaMemory, HostMemory, SharedEndpoint
from streamrl.weights.codecs.checksums import checksums
from streamrl.weights.layout import Layout
from streamrl.weights.transports.memory import export_from_gpu, make_on_host
from streamrl.weights.transports.shared_memory import STAMP_BYTES

log = logging.getLogger(__name__)

_COUNT = 2
_PAGE = 4096


@dataclass(frozen=True)
class Written:
    """A complete version: its bytes [layout.num_bytes] uint8, and their offset in the memory.

    `stamp` is that of the buffer number `buffer`; `event` is complete when a GPU has written all.
    """

    policy_version: int
    data: torch.Tensor
    start: int
    buffer: int
    stamp: int
    event: torch.cuda.Event | None


class SendBuffers:
    """Two copies of the parameters: while a transfer reads one, the learner writes the other.

    One would not do. A transfer may last longer than a step: either the learner would wait for it,
    or a slow receiver would never get a version that is whole.

    Invariant: the learner never waits for a reader, and a reader gets the newest complete version.
    `write` runs in the learner's thread, the rest in the sender's event loop and its threads.
    """

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        self.layout = layout
        self._stride = -(-layout.num_bytes // _PAGE) * _PAGE
        num_bytes = _COUNT * self._stride
        is_host = torch.device(device).type == "cpu"
        host, stamps = make_on_host(_PAGE + (num_bytes if is_host else 0), self)
        self._stamps = host[: _COUNT * STAMP_BYTES].view(torch.int64)
        self._first = _PAGE if is_host else 0
        self._memory = host
        if not is_host:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.exported = None if stamps is None else _exported(stamps, self._memory)
        """The memory of the stamps and of the buffers, for others to open; None if they cannot."""
        self._lock = threading.Lock()
        self._reading: Written | None = None
        self._newest: Written | None = None

    def write(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy (and cast) the parameters into a buffer, which becomes the newest."""
        with self._lock:
            busy = self._reading or self._newest
            buffer = 1 - busy.buffer if busy else 0
            if self._newest and self._newest.buffer == buffer:
                self._newest = None
            stamp = secrets.randbits(63)
            self._stamps[buffer] = stamp
        start = self._first + buffer * self._stride
        data = self._memory[start : start + self.layout.num_bytes]
        for slot in self.layout.slots:
            slot.write(slot.of(data), parameters[slot.spec.name].detach())
        event = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        with self._lock:
            self._newest = Written(policy_version, data, start, buffer, stamp, event)

    @contextmanager
    def reading(self) -> Iterator[Written | None]:
        """The newest version, which no write changes meanwhile; None if there is none."""
        with self._lock:
            self._reading = self._newest
            held = self._reading
        try:
            yield held
        finally:
            with self._lock:
                self._reading = None

    def endpoint(self, held: Written, key: bytes | None) -> SharedEndpoint:
        """Where receivers read the version that is held, with checksums of this key, if any. Waits
        until a GPU has written it."""
        assert self.exported is not None, "a route that needs shared memory was refused before"
        stamps, memory = self.exported
        if held.event is not None:
            held.event.synchronize()
        return SharedEndpoint(
            memory=memory,
            start=held.start,
            stamps=stamps,
            stamp_at=held.buffer * STAMP_BYTES,
            stamp=held.stamp,
            bucket_bytes=self.layout.bucket_bytes,
            checksums=checksums(self.layout.raws(held.data), key) if key else b"",
        )


def _exported(
    stamps: HostMemory, memory: torch.Tensor
) -> tuple[HostMemory, HostMemory | CudaMemory] | None:
    if not memory.is_cuda:
        return stamps, stamps
    try:
        return stamps, export_from_gpu(memory)
    except RuntimeError as error:
        log.warning("weights cannot be shared on this GPU: %s", error)
        return None
