"""torch.distributed groups between processes that were started separately.

A group is formed from a name in a TCPStore that the sender hosts, so there is no default process
group, no launcher, and a new group can exist beside a broken one. gloo sends host tensors, NCCL
device tensors.

Invariant: no call outlasts the group's timeout. After an error the group is unusable: `close` it
and form another one. gloo reports a peer that died before the call at once, one that died or froze
during it only at the timeout.
"""

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch._C._distributed_c10d import Store as TorchStore

from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint

IN_FLIGHT = 2
"""Broadcasts under way at a time."""


class Store:
    """The sender's rendezvous; receivers connect to `host`:`port`."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host = host
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self.port: int = self._store.port

    def join(self, name: str, world_size: int, backend: str, timeout_s: float) -> "Group":
        """Rank 0 of the named group. Waits for all ranks; unblocked by them or the timeout."""
        return _form(self._store, self.host, name, 0, world_size, backend, timeout_s)


def join(endpoint: BroadcastEndpoint) -> "Group":
    """A receiver's rank of the endpoint's group. Waits for all ranks or the timeout."""
    host, port = endpoint.host, endpoint.port
    try:
        store = TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=endpoint.timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise WeightTransferError(f"no weight store at {host}:{port}: {error}") from error
    return _form(
        store,
        host,
        endpoint.group,
        endpoint.rank,
        endpoint.world_size,
        endpoint.backend,
        endpoint.timeout_s,
    )


class Broadcast:
    """A broadcast under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Until the tensor has been sent or filled. Waits for the peers or the timeout.

        Raises:
            WeightTransferError: a peer is gone or too slow; the group is unusable.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightTransferError(f"broadcast failed: {error}") from error


class Group:
    """Broadcasts from rank 0 to everyone."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)

    def start(self, tensor: torch.Tensor) -> Broadcast:
        """Begin to send (rank 0) or fill (others) the tensor; all ranks begin in the same order.

        Raises:
            WeightTransferError: a peer is gone; the group is unusable.
        """
        try:
            return Broadcast(self._group.broadcast(tensor, 0, timeout=self._timeout))
        except RuntimeError as error:
            raise WeightTransferError(f"broadcast failed: {error}") from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """`start`, and wait until it is over."""
        self.start(tensor).wait()

    def pipelined(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Each tensor once it is sent or filled, while the next one is under way.

        A tensor may be used until the next one is asked for, so that two take turns. After an error
        or an early stop no broadcast is under way: none writes into memory that was given up.
        """
        pending: deque[tuple[torch.Tensor, Broadcast]] = deque()
        try:
            for tensor in tensors:
                pending.append((tensor, self.start(tensor)))
                if len(pending) == IN_FLIGHT:
                    yield _finished(pending)
            while pending:
                yield _finished(pending)
        finally:
            for _, broadcast in pending:
                with suppress(WeightTransferError):
                    broadcast.wait()

    def close(self) -> None:
        self._group.shutdown()


def _finished(pending: deque[tuple[torch.Tensor, Broadcast]]) -> torch.Tensor:
    tensor, broadcast = pending.popleft()
    broadcast.wait()
    return tensor


def _form(
    store: TorchStore,
    host: str,
    name: str,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
) -> Group:
    prefixed = PrefixStore(name, store)
    try:
        match backend:
            case "gloo":
                group = _gloo(prefixed, host, rank, world_size, timeout_s)
            case "nccl":
                group = _nccl(prefixed, rank, world_size, timeout_s)
            case _:
                raise WeightTransferError(f"weights.backend: was {backend!r}; gloo or nccl")
    except RuntimeError as error:
        raise WeightTransferError(f"group {name} did not form: {error}") from error
    return Group(group, timeout_s)


def _gloo(store: TorchStore, host: str, rank: int, world_size: int, timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: TorchStore, rank: int, world_size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`, at which peers there can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address
