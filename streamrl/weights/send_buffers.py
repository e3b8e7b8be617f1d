"""Where the learner leaves a version for the sender, so that neither waits for the other.

The buffers stand in memory that other processes can map, and each has a stamp, in host memory in
any case. A write sets a stamp never seen before ahead of the first byte it changes, and receivers
are told it only after the last one. So a receiver that still finds the stamp it was told when it
has copied everything has that version, however long it slept meanwhile: a seqlock of one store.
Both ends take a lock between stamp and bytes, which keeps their order on any processor: the writer
its own, the reader the interpreter's after a copy without it.

Used by `streamrl.weights.sender`, and by `transports.shared_memory` for the endpoints.
"""

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamrl.types import CudaMemory, HostMemory
from streamrl.weights.layout import Layout
from streamrl.weights.transports.memory import export_from_gpu, make_on_host

log = logging.getLogger(__name__)

STAMP_BYTES = 8
_COUNT = 2
_PAGE = 4096


@dataclass(frozen=True)
class Written:
    """A complete version: its bytes [layout.num_bytes] uint8, and where they begin in the memory.

    `stamp` is that of the buffer number `buffer`; `event` is over when a GPU has done the writing.
    """

    policy_version: int
    data: torch.Tensor
    start: int
    buffer: int
    stamp: int
    event: torch.cuda.Event | None


class SendBuffers:
    """Two copies of the parameters: while a transfer reads one, the learner writes the other.

    Invariant: the learner never waits for a reader, and a reader gets the newest complete version.
    `write` runs in the learner's thread, the rest in the loop that sends.
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
        """The stamps' memory and the buffers', as others open them; None where they cannot."""
        self._lock = threading.Lock()
        self._reading: Written | None = None
        self._newest: Written | None = None

    def write(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy (and cast) the parameters in; then they are the newest."""
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
        """The newest version, safe from being overwritten; None if there is none."""
        with self._lock:
            self._reading = self._newest
            held = self._reading
        try:
            yield held
        finally:
            with self._lock:
                self._reading = None


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
