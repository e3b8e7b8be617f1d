"""Weights in memory that both ends map, on one host or on one GPU.

`SendBuffers`: the learner writes a version into one, and the sender sends it from there, by
whichever route. Each has a stamp, always in host memory. A write sets a random stamp before the
first byte it changes, and receivers get the stamp only after the last one. So a receiver that still
finds its stamp after copying everything has that version, however long it was suspended meanwhile:
a seqlock of one store. Both ends take a lock between stamp and bytes, which keeps their order on
any processor: the writer its own, the reader the interpreter's after a copy without it.

The memory of a host is a memfd, a file without a name: the process that made it hands it to others
while it lives, through a socket that has a name in /dev/shm; the kernel frees it when the last of
them has ended, however it ended, and the size of /dev/shm (64 MB in a container) is no limit. A
descriptor that is received is the file itself: the ends need not see each other's process ids, so
containers that share /dev/shm do as processes of one machine. On a GPU it is what torch's own CUDA
IPC exports; all receivers open one export, whose reference counter is therefore meaningless, so the
memory has to stay until its process ends, as a sender's does.

Invariant: after the last tensor the stamp was still the endpoint's and the sender alive, or the
reader raises. Only processes of the same user open the memory, and none but the one that made it
can change it: the file is sealed against writes once it is mapped, and a receiver maps it
privately. (On a GPU nothing prevents writes.) A socket's name is there exactly as long as the
process that made it lives; that of one that was killed stays until the next one is made.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from msgspec import structs

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory, SharedEndpoint
from streamrl.weights.layout import Layout
from streamrl.weights.locality import SHARED_FOLDER, gpu_uuid
from streamrl.weights.transports.checksums import checksums, require_equal

log = logging.getLogger(__name__)

_NAMES = "streamrl-weights-{}.socket"
_WAIT_S = 10.0
_RETRY_S = 1.0


class DescriptorServer:
    """Hands the open file `fd` to everybody who connects to `path`; closes it at the end.

    Raises:
        OSError: there is no folder that this host's processes share.
    """

    def __init__(self, fd: int) -> None:
        _remove_abandoned()
        self._fd = fd
        self._closing = threading.Event()
        self.path = SHARED_FOLDER / _NAMES.format(secrets.token_hex(8))
        self._socket = socket.socket(socket.AF_UNIX)
        unfinished = self.path.with_suffix(".new")
        try:
            self._socket.bind(str(unfinished))
            unfinished.chmod(0o600)
            self._socket.listen(128)
            unfinished.rename(self.path)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread, which `shutdown` unblocks, unless garbage collection calls this in
        that thread."""
        self.path.unlink(missing_ok=True)
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        with self._socket:
            self._give()
        os.close(self._fd)

    def _give(self) -> None:
        """Serve connections until closed; after a failed accept (too many open files) wait
        _RETRY_S. One byte and a descriptor always fit into a new connection's buffer, so this never
        waits for a receiver."""
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closing.wait(_RETRY_S):
                    log.warning("no process was given the weights' memory: %s", error)
                continue
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                socket.send_fds(connection, [b"\0"], [self._fd])


def receive_descriptor(path: str) -> int:
    """The open file from the server at this path. Waits at most _WAIT_S.

    Raises:
        OSError: nobody is there, it is another user's, or it does not answer.
    """
    with _connect(path) as connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError(0, "its process gives no file")
    return descriptors[0]


def _connect(path: str) -> socket.socket:
    """
    Raises:
        OSError: the server's process has ended, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_WAIT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _remove_abandoned() -> None:
    """Remove the names that killed processes have left."""
    for path in SHARED_FOLDER.glob(_NAMES.format("*")):
        with contextlib.suppress(OSError):
            try:
                _connect(str(path)).close()
            except ConnectionRefusedError:
                path.unlink()


# Since Linux 5.1; Python 3.13 has a name for it.
_F_SEAL_FUTURE_WRITE = 0x10


def make_on_host(num_bytes: int, owner: object) -> tuple[torch.Tensor, HostMemory | None]:
    """Allocate zeros [num_bytes] uint8; the tensor, and how others open it while `owner` lives
    (None if the system has no such memory). The tensor lasts as long as it is used."""
    try:
        fd = os.memfd_create("streamrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return torch.zeros(num_bytes, dtype=torch.uint8), None
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
    _seal(fd)
    inode = os.fstat(fd).st_ino
    try:
        server = DescriptorServer(fd)
    except OSError as error:
        log.warning("weights cannot be shared on this host: %s", error)
        os.close(fd)
        return tensor, None
    weakref.finalize(owner, server.close)
    return tensor, HostMemory(socket=str(server.path), inode=inode, num_bytes=num_bytes)


def export_from_gpu(tensor: torch.Tensor) -> CudaMemory:
    """How others open the whole of `tensor`, flat uint8 on a GPU.

    Raises:
        RuntimeError: from CUDA, if the driver cannot export memory.
    """
    _, *exported = tensor.untyped_storage()._share_cuda_()
    # All fields except the GPU are torch's, in its order.
    fields = dict(zip(CudaMemory.__struct_fields__[1:], exported, strict=True))
    return CudaMemory(gpu=gpu_uuid(tensor.get_device()), **fields)


def open_memory(memory: HostMemory | CudaMemory) -> torch.Tensor:
    """Open another process's memory; its bytes [num_bytes] uint8, read-only.

    Raises:
        WeightTransferError: the memory is gone, on another machine or GPU, or another user's.
    """
    return _open_on_host(memory) if isinstance(memory, HostMemory) else _open_on_gpu(memory)


def require_present(memory: HostMemory) -> None:
    """Check that the process that made the memory still lives.

    Raises:
        WeightTransferError: it has ended, or is on another machine or another user's.
    """
    try:
        _connect(memory.socket).close()
    except OSError as error:
        raise _unreachable(memory, error.strerror or str(error)) from error


def _seal(fd: int) -> None:
    """Allow writes only through the existing mapping, and fix size and seals."""
    kept = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, kept | _F_SEAL_FUTURE_WRITE)
    except OSError:
        log.info("this kernel cannot seal memory against writes of other processes of this user")


def _open_on_host(memory: HostMemory) -> torch.Tensor:
    try:
        fd = receive_descriptor(memory.socket)
    except OSError as error:
        raise _unreachable(memory, error.strerror or str(error)) from error
    try:
        file = os.fstat(fd)
        expected = (memory.inode, memory.num_bytes)
        if not stat.S_ISREG(file.st_mode) or (file.st_ino, file.st_size) != expected:
            raise _unreachable(memory, "another file is there")
        path = f"/proc/self/fd/{fd}"
        return torch.from_file(path, size=memory.num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise _unreachable(memory, str(error)) from error
    finally:
        os.close(fd)


def _open_on_gpu(memory: CudaMemory) -> torch.Tensor:
    visible = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if memory.gpu not in visible:
        raise WeightTransferError(
            f"the learner's GPU {memory.gpu} is not one of this process's ({visible or 'none'}); "
            "weights.backend shared needs learner and generators on one GPU"
        )
    index = visible.index(memory.gpu)
    try:
        with torch.cuda.device(index):
            storage = torch.UntypedStorage._new_shared_cuda(index, *structs.astuple(memory)[1:])
    except RuntimeError as error:
        raise WeightTransferError(f"the learner's GPU memory cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def _unreachable(memory: HostMemory, reason: str) -> WeightTransferError:
    return WeightTransferError(
        f"the learner's memory at {memory.socket} cannot be opened here ({reason}); "
        "weights.backend shared needs learner and generators on one machine, under one user, with "
        "one /dev/shm"
    )


STAMP_BYTES = 8


class SharedReader:
    """Keeps the sender's memory mapped from one update to the next."""

    def __init__(self) -> None:
        self._mapped: dict[HostMemory | CudaMemory, torch.Tensor] = {}

    def tensors(
        self,
        endpoint: SharedEndpoint,
        layout: Layout,
        landing: torch.Tensor | None,
        key: bytes,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name: in `landing` if given, otherwise read-only in the sender's memory.
        `key` is the checksums' key.

        Raises:
            WeightTransferError: the memory cannot be opened, or was overwritten during the read.
        """
        try:
            memory, stamps = self._map(endpoint.memory, endpoint.stamps)
            _require_inside(endpoint, layout)
            stamp = stamps[endpoint.stamp_at : endpoint.stamp_at + STAMP_BYTES].view(torch.int64)
            data = memory[endpoint.start : endpoint.start + layout.num_bytes]
            _require_same(stamp, endpoint)
            received = bytearray()
            for bucket in layout.buckets:
                raw = bucket.of(data)
                if landing is not None:
                    raw = bucket.of(landing).copy_(raw)
                if endpoint.checksums:
                    received += checksums(bucket.raws(raw), key)
                yield from bucket.views(raw)
            if data.is_cuda:
                # Copies out of it, including the caller's, may have been running until here.
                torch.cuda.current_stream(data.device).synchronize()
            _require_same(stamp, endpoint)
            require_present(endpoint.stamps)
            if endpoint.checksums:
                require_equal(layout.names, endpoint.checksums, bytes(received), "the sender")
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        self._mapped = {}

    def _map(self, *wanted: HostMemory | CudaMemory) -> list[torch.Tensor]:
        """Unmap memory that is no longer wanted, and open what is not mapped yet."""
        self._mapped = {one: held for one, held in self._mapped.items() if one in wanted}
        missing = dict.fromkeys(one for one in wanted if one not in self._mapped)
        self._mapped = {**self._mapped, **{one: open_memory(one) for one in missing}}
        return [self._mapped[one] for one in wanted]


def _require_inside(endpoint: SharedEndpoint, layout: Layout) -> None:
    ends = {
        "version": (endpoint.start + layout.num_bytes, endpoint.memory.num_bytes),
        "stamp": (endpoint.stamp_at + STAMP_BYTES, endpoint.stamps.num_bytes),
    }
    for name, (end, size) in ends.items():
        if end > size or endpoint.stamp_at % STAMP_BYTES:
            raise WeightTransferError(f"the {name} ends at byte {end} of {size} of the memory")


def _require_same(stamp: torch.Tensor, endpoint: SharedEndpoint) -> None:
    if stamp.item() != endpoint.stamp:
        raise WeightTransferError(
            "the learner has overwritten the version before it was read: this receiver was too late"
        )


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

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class SendBuffers:
    """Two copies of the parameters: while a transfer reads one, the learner writes the other.

    One copy is not enough: a transfer may last longer than a step, so either the learner would wait
    for it, or a slow receiver would never get a complete version.

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
        """How others open the memory of the stamps and buffers; None if they cannot."""
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
        """The newest version, which no write changes during the block; None if there is none."""
        with self._lock:
            self._reading = self._newest
            held = self._reading
        try:
            yield held
        finally:
            with self._lock:
                self._reading = None

    def endpoint(self, held: Written, key: bytes | None) -> SharedEndpoint:
        """Where receivers read the held version, with checksums by this key, if any. Waits until a
        GPU has written it."""
        assert self.exported is not None, "a route that needs shared memory was refused before"
        stamps, memory = self.exported
        held.wait()
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
