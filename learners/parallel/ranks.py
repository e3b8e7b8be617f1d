"""Exchange between a learner's ranks, apart from parameters and gradients.

Records and tensors in host memory travel over gloo: columns divided among the ranks, denominators
of a batch, metrics. A single rank exchanges nothing and has no group.

Invariant: all ranks make the same calls in the same order; what crosses is a tensor or an envelope
of `streamrl.wire`. A call waits for the other ranks until the deadline of its group, or until one
of them ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl import wire
from streamrl.errors import TransportError

Record = TypeVar("Record")

UNBOUNDED = timedelta(days=3650)
"""The timeout of a group that waits as long as its ranks wait for groups or a disk; `Liveness`
detects lost ranks."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process's place among `count` ranks, and the group that joins them."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def sum(self, column: Tensor) -> Tensor:
        """The sum over all ranks. A column of which each rank has some rows, and 0 elsewhere, is
        completed bit for bit."""
        if self.count > 1:
            with in_time():
                dist.all_reduce(column, group=self.group)
        return column

    def first(self, column: Tensor) -> Tensor:
        """The first rank's tensor, on every rank; shapes must be equal."""
        return self.sum(column if self.index == 0 else torch.zeros_like(column))

    def gather(self, record: Record, kind: type[Record] | None = None) -> list[Record]:
        """Every rank's record, of type `kind`, in rank order."""
        if self.count == 1:
            return [record]
        data = torch.frombuffer(bytearray(wire.encode(record)), dtype=torch.uint8)
        lengths = self._all(torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        received = zip(lengths, self._all(padded), strict=True)
        expected: Any = kind or type(record)
        return [wire.decode(_bytes(tensor[:length]), expected) for length, tensor in received]

    def send(self, record: Any) -> None:
        """Send a record to every other rank, which calls `receive`."""
        if self.count > 1:
            data = torch.frombuffer(bytearray(wire.encode(record)), dtype=torch.uint8)
            self._from_first(torch.tensor([len(data)]))
            self._from_first(data)

    def receive(self, kind: Any) -> Any:
        """Receive what the first rank sends. Waits for it."""
        length = self._from_first(torch.zeros(1, dtype=torch.int64))
        data = self._from_first(torch.zeros(int(length), dtype=torch.uint8))
        return wire.decode(_bytes(data), kind)

    def _from_first(self, tensor: Tensor) -> Tensor:
        with in_time():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def _all(self, tensor: Tensor) -> Sequence[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        with in_time():
            dist.all_gather(gathered, tensor, group=self.group)
        return gathered


@contextmanager
def in_time() -> Iterator[None]:
    """Wraps a collective operation; TransportError if another rank has ended, or does not take part
    within the deadline."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"a rank of the learner ended or does not answer: {error}") from error


def _bytes(data: Tensor) -> bytes:
    return bytes(data.numpy())
