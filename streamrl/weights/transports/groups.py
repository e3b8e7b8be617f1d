"""torch.distributed groups between processes that were started separately.

A group is formed from a name in a store that the sender hosts, so there is no default process
group, no launcher, and a new group can exist beside a broken one. gloo sends host tensors; its
members meet in a `RendezvousServer`, whose key they need. NCCL sends device tensors; its members
meet in torch's TCPStore, which has no key.

Invariant: no call outlasts the group's timeout, but for the connection of NCCL, which has twice as
much. After an error the group is unusable: `close` it and form another one. gloo reports a peer
that died before the call at once, one that died or froze during it only at the timeout. torch's
thread that watches over NCCL would end this process when a broadcast fails or takes too long: these
groups have none, and whoever waits for a broadcast watches it. Closing one ends what is under way,
for NCCL's orderly end waits for peers, which may be gone.

torch's own store lets everybody who reaches its port list, read and write the members' addresses.
The connection to a `RendezvousServer` is encrypted with a key of this group alone, which only the
announcement tells: its public CURVE key, without which no handshake begins. Whoever does not know
it is not read.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import zmq
from msgspec import Struct
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from streamrl import wire
from streamrl.config.addresses import address_family, address_towards, port_of, url_host
from streamrl.curve import choose_family, serve_with_new_key, use_key
from streamrl.errors import WeightTransferError, WireError
from streamrl.shutdown import in_thread
from streamrl.types import BroadcastEndpoint

log = logging.getLogger(__name__)

MAX_VALUES = 2**16
MAX_MESSAGE_BYTES = 2**16
_POLL_MS = 100
_POLL_GPU_S = 0.0005


class Put(Struct, frozen=True, tag="put"):
    key: str
    value: bytes


class FetchKey(Struct, frozen=True, tag="fetch"):
    """Answered when there is a value of this key."""

    key: str


class Values(Struct, frozen=True):
    """All values that are there, by key."""

    by_key: dict[str, bytes]


Request: TypeAlias = Put | FetchKey


class RendezvousServer:
    """Serves one group's values, MAX_VALUES small ones, at `host`:`port`, from a thread of its own,
    until closed."""

    def __init__(self, host: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        place = f"tcp://{url_host(host)}"
        choose_family(self._socket, place)
        self.key = serve_with_new_key(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(f"{place}:0")
        self.port = port_of(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        self._values: dict[str, bytes] = {}
        self._waiting: dict[bytes, str] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Returns at once; the thread closes the socket."""
        self._stop.set()

    def _serve(self) -> None:
        """Waits for the members' requests, until closed."""
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                address, *frames = self._socket.recv_multipart()
                try:
                    self._handle(address, wire.decode(frames[-1], Request))  # type: ignore[arg-type]
                except WireError as error:
                    log.warning("unreadable message from the member of a group: %s", error)
        self._socket.close()

    def _handle(self, address: bytes, request: Request) -> None:
        if isinstance(request, Put) and len(self._values) < MAX_VALUES:
            self._values[request.key] = request.value
        self._waiting[address] = request.key
        for member, key in list(self._waiting.items()):
            if key in self._values:
                del self._waiting[member]
                self._socket.send_multipart([member, b"", wire.encode(Values(self._values))])


class RendezvousStore(Store):
    """A member's end, as torch.distributed takes it; the caller keeps it while the group forms.

    Invariant: each call ends within `timeout_s`, by a RuntimeError if the value is not there.
    """

    def __init__(self, host: str, port: int, key: str, timeout_s: float) -> None:
        super().__init__()
        self._place = f"{url_host(host)}:{port}"
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        use_key(self._socket, key)
        choose_family(self._socket, f"tcp://{self._place}")
        self._socket.connect(f"tcp://{self._place}")

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Put(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for the value, until the timeout."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values of all keys; the shorter of both timeouts holds for each."""
        for key in keys:
            if key not in self._values:
                self._call(FetchKey(key), timeout)

    def close(self) -> None:
        self._socket.close()

    def _call(self, request: Request, timeout: timedelta | None = None) -> None:
        wait_s = min(self._timeout_s, timeout.total_seconds() if timeout else self._timeout_s)
        self._socket.send(wire.encode(request))
        if not self._socket.poll(int(1000 * wait_s)):
            raise RuntimeError(
                f"no answer from the weight sender's rendezvous at {self._place} to "
                f"{type(request).__name__} {request.key} for {wait_s:g} s"
            )
        self._values = wire.decode(self._socket.recv(), Values).by_key


_HOST = torch.device("cpu")
IN_FLIGHT = 2
"""Broadcasts under way at a time."""


class OpenStore:
    """torch's TCPStore at `host`:`port`: whoever reaches the port may read and write it."""

    key = ""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host = host
        # torch itself would listen on every interface of the machine.
        listening = socket.create_server(
            (host, 0), family=address_family(host), backlog=socket.SOMAXCONN
        )
        self.port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )

    def join(
        self,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        device: torch.device = _HOST,
    ) -> "BroadcastGroup":
        """Rank 0 of the named group. Waits for all ranks; unblocked by them or the timeout."""
        return _form(self._store, self.host, name, 0, world_size, backend, timeout_s, device)


def join(endpoint: BroadcastEndpoint, device: torch.device = _HOST) -> "BroadcastGroup":
    """The endpoint's rank of its group, whose tensors are on the device. Waits for all ranks or the
    timeout."""
    host, port, timeout_s = endpoint.host, endpoint.port, endpoint.timeout_s
    store: Store
    try:
        if endpoint.key:
            store = RendezvousStore(host, port, endpoint.key, timeout_s)
        else:
            timeout = timedelta(seconds=timeout_s)
            store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, zmq.ZMQError, ValueError) as error:
        raise WeightTransferError(f"no weight store at {host}:{port}: {error}") from error
    group = (endpoint.group, endpoint.rank, endpoint.world_size, endpoint.backend)
    try:
        return _form(store, host, *group, timeout_s, device)
    except WeightTransferError:
        _close(store)
        raise


def _close(store: Store) -> None:
    if isinstance(store, RendezvousStore):
        store.close()


class Broadcast:
    """A broadcast under way."""

    def __init__(self, work: Any, timeout_s: float | None) -> None:
        """`timeout_s` is that of NCCL, whose own `wait` is one of the GPU: the learner's next
        kernels would wait, too, and the host would not."""
        self._work = work
        self._ends_s = None if timeout_s is None else time.monotonic() + timeout_s

    def wait(self) -> None:
        """Until the tensor has been sent or filled. Waits for the peers or the timeout.

        Raises:
            WeightTransferError: a peer is gone or too slow; the group is unusable.
        """
        try:
            if self._ends_s is not None:
                self._wait_on_host(self._ends_s)
            self._work.wait()
        except RuntimeError as error:
            raise WeightTransferError(f"broadcast failed: {error}") from error

    def _wait_on_host(self, ends_s: float) -> None:
        while not self._work.is_completed():
            if time.monotonic() > ends_s:
                raise WeightTransferError("broadcast failed: a peer is too slow")
            time.sleep(_POLL_GPU_S)


class BroadcastGroup:
    """Broadcasts from rank 0 to everyone; the store lasts as long."""

    def __init__(self, group: Any, store: Store, timeout_s: float) -> None:
        self._group = group
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)

    def start(self, tensor: torch.Tensor) -> Broadcast:
        """Begin to send (rank 0) or fill (others) the tensor; all ranks begin in the same order.

        Raises:
            WeightTransferError: a peer is gone; the group is unusable.
        """
        try:
            work = self._group.broadcast(tensor, 0, timeout=self._timeout)
            return Broadcast(work, self._timeout.total_seconds() if tensor.is_cuda else None)
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
        """Ends what is under way. Each member has said what it loaded, so nobody lacks it."""
        if isinstance(self._group, ProcessGroupGloo):
            self._group.shutdown()
        else:
            try:
                self._group.abort()
            except RuntimeError as error:
                log.warning("a group of NCCL did not end: %s", error)
        _close(self._store)


def _finished(pending: deque[tuple[torch.Tensor, Broadcast]]) -> torch.Tensor:
    tensor, broadcast = pending.popleft()
    broadcast.wait()
    return tensor


def _form(
    store: Store,
    host: str,
    name: str,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    device: torch.device,
) -> BroadcastGroup:
    prefixed = PrefixStore(name, store)
    try:
        match backend:
            case "gloo":
                group = _gloo(prefixed, host, rank, world_size, timeout_s)
            case "nccl":
                group = _nccl(prefixed, rank, world_size, timeout_s, device)
            case _:
                raise WeightTransferError(f"weights.backend: was {backend!r}; gloo or nccl")
    except (RuntimeError, OSError, WireError, zmq.ZMQError) as error:
        raise WeightTransferError(f"group {name} did not form: {error}") from error
    return BroadcastGroup(group, store, timeout_s)


def _gloo(store: Store, host: str, rank: int, world_size: int, timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, timeout_s: float, device: torch.device) -> Any:
    """Waits for all ranks in the store first: whom NCCL waits for, it does so for ever."""
    store.set(f"rank {rank}", "")
    store.wait([f"rank {other}" for other in range(world_size)], timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _unwatched():
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    _connect(group, torch.empty(0, device=device).device, 2 * timeout_s)
    return group


def _connect(group: Any, device: torch.device, timeout_s: float) -> None:
    """By a thread, which is left behind if NCCL reaches nobody.

    Raises:
        WeightTransferError: it has not, in time.
    """
    try:
        in_thread(lambda: group.eager_connect_single_device(device), "nccl").result(timeout_s)
    except TimeoutError as error:
        raise WeightTransferError(
            f"NCCL has not connected the learner's and the generators' GPUs in {timeout_s:.1f} s: "
            "name the network in NCCL_SOCKET_IFNAME, raise weights.deadline_s, or use "
            "weights.backend gloo"
        ) from error


_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@contextmanager
def _unwatched() -> Iterator[None]:
    """A group of NCCL that is made meanwhile reads it, and gets no watching thread."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BLOCKING_WAIT)
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before
