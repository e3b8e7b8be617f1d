"""The locality of a process: the host and GPU where weights are sent from or received.

A sender compares its own with each receiver's, to see who can share its memory and who can take
part in an NCCL broadcast.
"""

from pathlib import Path
from typing import Literal

import torch

from streamrl.types import Locality

SHARED_FOLDER = Path("/dev/shm")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def locality_of(device: torch.device | str, num_ranks: int = 1) -> Locality:
    """The locality of this process, or of its `num_ranks` workers, each on its own GPU, counted
    from the first visible one."""
    device = torch.device(device)
    if device.type != "cuda":
        return Locality(host=this_host(), device_type=device.type)
    first = 0 if num_ranks > 1 else device.index or 0
    if first + num_ranks > torch.cuda.device_count():
        # The workers are on other machines.
        return Locality(device_type="cuda")
    gpus = tuple(gpu_uuid(index) for index in range(first, first + num_ranks))
    return Locality(host=this_host(), device_type="cuda", gpus=gpus)


def this_host() -> str:
    """The boot id and the file system at /dev/shm: equal where processes can share memory by name.

    A container is a host of its own unless it shares /dev/shm; "" if the system does not say.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}/{SHARED_FOLDER.stat().st_dev}"
    except OSError:
        return ""


def gpu_uuid(index: int) -> str:
    """Identifies the GPU; an index depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)


def can_share(sender: Locality, receiver: Locality) -> bool:
    """Whether the receiver can map the memory that the sender's buffers are in."""
    if not sender.host or sender.host != receiver.host:
        return False
    return sender.device_type == "cpu" or (bool(sender.gpus) and sender.gpus == receiver.gpus)


def backend_among(localities: list[Locality]) -> Literal["gloo", "nccl"]:
    """The backend for a broadcast among these. Unknown GPUs count as different, like those of other
    machines."""
    gpus = [gpu for locality in localities for gpu in locality.gpus]
    are_different = len(set(gpus)) == len(gpus)
    on_gpus = all(locality.device_type == "cuda" for locality in localities)
    return "nccl" if on_gpus and are_different else "gloo"
