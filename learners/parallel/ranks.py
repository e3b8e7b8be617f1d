"""What the ranks of a learner exchange besides parameters and gradients.

Records and tensors in host memory, over gloo: a column that is divided among the ranks, the
denominators of a batch, metrics. A world of one exchanges nothing and has no group.

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
"""Of a group that waits as long as one of its ranks does, for groups or a disk; who is lost,
`Liveness` knows."""


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
        """The sum over all ranks. A column of which each rank has some rows, and 0 elsewhere,
        becomes whole, bit for bit."""
        if self.count > 1:
            with in_time():
                dist.all_reduce(column, group=self.group)
        return column

    def first(self, column: Tensor) -> Tensor:
        """That of the first rank, on every rank; all have the same shape."""
        return self.sum(column if self.index == 0 else torch.zeros_like(column))

    def gather(self, record: Record, kind: type[Record] | None = None) -> list[Record]:
        """Every rank's record, of type `kind`, in the order of the ranks."""
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
        """To every other rank, which calls `receive`."""
        if self.count > 1:
            data = torch.frombuffer(bytearray(wire.encode(record)), dtype=torch.uint8)
            self._from_first(torch.tensor([len(data)]))
            self._from_first(data)

    def receive(self, kind: Any) -> Any:
        """What the first rank sends. Waits until it does."""
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
    """Around a collective operation; TransportError if another rank has ended, or does not take
    part within the deadline."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"a rank of the learner ended or does not answer: {error}") from error


def _bytes(data: Tensor) -> bytes:
    return bytes(data.numpy())
