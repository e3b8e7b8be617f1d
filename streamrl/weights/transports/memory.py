"""Memory that two processes of one machine share: allocated in one, opened in the other.

On the host it is a memfd, a file without a name: the process that made it hands it to others while
it lives (`streamrl.weights.transports.memory`), the kernel frees it when the last of them has
ended, however it ended, and the size of /dev/shm (64 MB in a container) is no limit. On a GPU it is
what torch's own CUDA IPC exports; all receivers open one export, whose reference counter is
therefore meaningless, so the memory has to stay until its process ends, as a sender's does.

Invariant: only processes of the same user open it, and none but the one that made it can change it:
the file is sealed against writes once it is mapped. A receiver maps it privately. (On a GPU nothing
prevents writes.)

Hands an open file to other processes of this user, through a socket that has a name in /dev/shm.

A descriptor that is received is the file itself, in whatever process: sender and receiver need not
see each other's process ids, so containers that share /dev/shm do as processes of one machine.

Invariant: a name is there once its socket accepts connections, which it does exactly as long as the
process that made it lives. The name of one that was killed stays until the next one is made.
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
from pathlib import Path

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory
from streamrl.weights.locality import SHARED_FOLDER, gpu_uuid

log = logging.getLogger(__name__)

_NAMES = "streamrl-weights-{}.socket"
_WAIT_S = 10.0
_RETRY_S = 1.0


class DescriptorServer:
    """Gives everybody who connects to `path` the open file `fd`, which it closes in the end.

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
        """Waits for the thread, which `shutdown` unblocks."""
        self.path.unlink(missing_ok=True)
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        os.close(self._fd)

    def _serve(self) -> None:
        """Waits for connections, until closed; where none can be accepted, as the process may open
        no more files, for _RETRY_S. One byte and a descriptor always fit into a new connection's
        buffer, so no receiver is waited for."""
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
    """The open file that the server at the path gives; waits _WAIT_S at most.

    Raises:
        OSError: nobody is there, it is another user's, or it does not answer.
    """
    with _connect(path) as connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError(0, "its process gives no file")
    return descriptors[0]


def require_served(path: str) -> None:
    """
    Raises:
        OSError: the server's process has ended, or it is another user's.
    """
    _connect(path).close()


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_WAIT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _remove_abandoned() -> None:
    """The names of processes that were killed."""
    for path in SHARED_FOLDER.glob(_NAMES.format("*")):
        with contextlib.suppress(OSError):
            if not _is_served(path):
                path.unlink()


def _is_served(path: Path) -> bool:
    try:
        require_served(str(path))
    except ConnectionRefusedError:
        return False
    return True


# Linux 5.1; Python 3.13 has a name for it.
_F_SEAL_FUTURE_WRITE = 0x10


def make_on_host(num_bytes: int, owner: object) -> tuple[torch.Tensor, HostMemory | None]:
    """Zeros [num_bytes] uint8, and how others open them while `owner` lives; None where the system
    has no such memory. The tensor itself lasts as long as it is used."""
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
        RuntimeError: from CUDA, where the driver cannot export memory.
    """
    _, *exported = tensor.untyped_storage()._share_cuda_()
    handle, num_bytes, offset, counter, counter_offset, event, waits_for_event = exported
    return CudaMemory(
        gpu=gpu_uuid(tensor.get_device()),
        handle=handle,
        num_bytes=num_bytes,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits_for_event=waits_for_event,
    )


def open_memory(memory: HostMemory | CudaMemory) -> torch.Tensor:
    """Its bytes [num_bytes] uint8, read-only.

    Raises:
        WeightTransferError: the memory is gone, on another machine or GPU, or another user's.
    """
    match memory:
        case HostMemory():
            return _open_on_host(memory)
        case CudaMemory():
            return _open_on_gpu(memory)


def require_present(memory: HostMemory) -> None:
    """Check that the process that made the memory still lives.

    Raises:
        WeightTransferError: it does not, or it is on another machine or another user's.
    """
    try:
        require_served(memory.socket)
    except OSError as error:
        raise _unreachable(memory, error.strerror or str(error)) from error


def _seal(fd: int) -> None:
    """No more writes but through the mapping that is there; size and seals stay as they are."""
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
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                memory.handle,
                memory.num_bytes,
                memory.offset,
                memory.counter,
                memory.counter_offset,
                memory.event,
                memory.waits_for_event,
            )
    except RuntimeError as error:
        raise WeightTransferError(f"the learner's GPU memory cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def _unreachable(memory: HostMemory, reason: str) -> WeightTransferError:
    return WeightTransferError(
        f"the learner's memory at {memory.socket} cannot be opened here ({reason}); "
        "weights.backend shared needs learner and generators on one machine, under one user, with "
        "one /dev/shm"
    )
