"""Memory that two processes of one machine have in common: made here, opened there.

On the host it is a memfd, a file without a name: others open it through /proc while its maker
lives, the kernel frees it when the last of them is gone, whatever killed them, and the size of
/dev/shm (64 MB in a container) is no limit. On a GPU it is what torch's own CUDA IPC exports; all
receivers open one export, whose counter of references is therefore meaningless, so the memory has
to stay until its maker ends, as a sender's does.

Invariant: whoever opens memory cannot change it: it is mapped privately, so a write goes to a copy
of the page. (On a GPU nothing keeps it from writing.) Used by `send_buffers` and `shared`.
"""

import os
import stat
import weakref

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory
from streamrl.weights.locality import gpu_uuid


def make_on_host(num_bytes: int, owner: object) -> tuple[torch.Tensor, HostMemory | None]:
    """Zeros [num_bytes] uint8 that last as long as they are used, and what others open them by
    while `owner` lives; None where the system has no such memory."""
    try:
        fd = os.memfd_create("streamrl-weights")
    except (AttributeError, OSError):
        return torch.zeros(num_bytes, dtype=torch.uint8), None
    weakref.finalize(owner, os.close, fd)
    os.ftruncate(fd, num_bytes)
    tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
    inode = os.fstat(fd).st_ino
    return tensor, HostMemory(pid=os.getpid(), fd=fd, inode=inode, num_bytes=num_bytes)


def export_from_gpu(tensor: torch.Tensor) -> CudaMemory:
    """What others open the whole of `tensor` by, flat uint8 on a GPU.

    Raises:
        RuntimeError: by CUDA, where the driver cannot do it.
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
    """Its bytes [num_bytes] uint8, to be read only.

    Raises:
        WeightTransferError: it is gone, or not on this machine, this GPU, or for this user.
    """
    match memory:
        case HostMemory():
            return _open_on_host(memory)
        case CudaMemory():
            return _open_on_gpu(memory)


def require_present(memory: HostMemory) -> None:
    """Its maker still lives.

    Raises:
        WeightTransferError: it does not, or it is on another machine or another user's.
    """
    try:
        found = os.stat(_path(memory))
    except OSError as error:
        raise _unreachable(memory, str(error.strerror)) from error
    if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (
        memory.inode,
        memory.num_bytes,
    ):
        raise _unreachable(memory, "another file stands there")


def _open_on_host(memory: HostMemory) -> torch.Tensor:
    require_present(memory)
    try:
        return torch.from_file(_path(memory), size=memory.num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise _unreachable(memory, str(error)) from error


def _open_on_gpu(memory: CudaMemory) -> torch.Tensor:
    seen = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if memory.gpu not in seen:
        raise WeightTransferError(
            f"the learner's GPU {memory.gpu} is not one of this process's ({seen or 'none'}); "
            "weights.backend shared needs learner and generators on one GPU"
        )
    index = seen.index(memory.gpu)
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


def _path(memory: HostMemory) -> str:
    return f"/proc/{memory.pid}/fd/{memory.fd}"


def _unreachable(memory: HostMemory, reason: str) -> WeightTransferError:
    return WeightTransferError(
        f"the learner's memory {_path(memory)} cannot be opened here ({reason}); weights.backend "
        "shared needs learner and generators on one machine, under one user"
    )
