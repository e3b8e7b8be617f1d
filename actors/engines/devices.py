"""What an inference server that is started on this machine may run on.

Read by the engines that start one, before anything of the inference library is imported.
"""

from pathlib import Path

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_gpu() -> bool:
    """Whether a server on this machine may run on a GPU, whichever torch is installed here."""
    return any(path.exists() for path in _GPU_DEVICES)
