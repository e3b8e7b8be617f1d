"""Whether this machine has the devices, the packages and the folder that a run needs."""

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from actors.engines import find_engine
from buffers.connect import require_redis
from streamrl.checkpoints.find import is_checkpoint
from streamrl.cli.preflight.findings import Finding, fact, problem, refusal, warning
from streamrl.config import RunConfig

_FEW_BYTES = 200 * 2**20
_ROCM = Path("/dev/kfd")


def check_packages(config: RunConfig) -> Iterator[Finding]:
    """What is installed only for those who ask for it; nothing is imported."""
    yield from refusal(lambda: find_engine(config.generator))
    if config.buffer.url.startswith("redi"):
        yield from refusal(require_redis)
    tracking = config.tracking
    wanted = {"tensorboard": tracking.tensorboard, "wandb": tracking.wandb != "off"}
    for name, is_wanted in wanted.items():
        if is_wanted and find_spec(name) is None:
            yield problem(f"tracking.{name}: is not installed: pip install 'streamrl[{name}]'")
    if tracking.wandb == "online" and find_spec("wandb") and not _has_wandb_key():
        yield problem(
            "tracking.wandb: online needs a key, and there is none: `wandb login`, or "
            "WANDB_API_KEY in the environment; offline needs none"
        )
    yield fact(f"generator.engine: {config.generator.engine}")


def check_devices(config: RunConfig) -> Iterator[Finding]:
    """The GPUs that the driver sees, and those that torch can use."""
    num_gpus = 0 if not torch_has_cuda() else count_gpus()
    if num_gpus is None:
        yield fact("learner.device: GPUs are not counted here (ROCm)")
        return
    here = f"{num_gpus} GPU{'' if num_gpus == 1 else 's'} here"
    why = "" if torch_has_cuda() else ": the installed torch is a build for CPUs"
    for owner, device in (
        ("learner", config.learner.device),
        ("generator", config.generator.device),
    ):
        kind, _, number = device.partition(":")
        is_elsewhere = owner == "generator" and _server_elsewhere(config)
        if kind == "cuda" and int(number or 0) >= num_gpus and not is_elsewhere:
            yield problem(f"{owner}.device: was {device!r}, and there are {here}{why}")
    if config.weights.backend == "nccl" and not num_gpus:
        yield problem(f"weights.backend: nccl needs GPUs, and there are {here}{why}")
    generator = config.generator
    num_ranks = generator.num_ranks
    if generator.engine == "vllm" and not generator.vllm.url and 1 < num_gpus < num_ranks:
        yield problem(f"generator.vllm.tensor_parallel_size: was {num_ranks}, and there are {here}")
    yield fact(f"learner.device: {config.learner.device}, {here}")


def check_folder(config: RunConfig) -> Iterator[Finding]:
    """Whether the run's folder can be made and written, by writing beside it."""
    folder = config.run.path
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield problem(f"run.folder: {existing} is a file, so {folder} cannot be made")
        return
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        yield problem(f"run.folder: cannot write to {existing}: {error.strerror}")
        return
    status = os.statvfs(existing)
    num_bytes = status.f_bavail * status.f_frsize
    if num_bytes < _FEW_BYTES:
        yield warning(
            f"run.folder: {existing} has {num_bytes / 1e6:.3g} MB left for journal and checkpoints"
        )
    yield from _check_resume(config)
    yield fact(f"run.folder: {folder} can be written, {num_bytes / 1e9:.3g} GB free")


def _check_resume(config: RunConfig) -> Iterator[Finding]:
    path = config.run.resume
    if isinstance(path, Path) and not is_checkpoint(path):
        yield problem(f"run.resume: {path} is no checkpoint (it has no state.json)")


def _server_elsewhere(config: RunConfig) -> bool:
    engines = {"vllm": config.generator.vllm.url, "sglang": config.generator.sglang.url}
    return bool(engines.get(config.generator.engine))


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for GPUs, read from its version without importing it.

    True if that cannot be told.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^(cuda|hip)\b[^=]*= *None", text, re.MULTILINE) is None or bool(
        re.search(r"^(cuda|hip)\b[^=]*= *['\"]", text, re.MULTILINE)
    )


def count_gpus() -> int | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None under ROCm."""
    if _ROCM.exists():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return 0
    return number.value


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(str(host)) is not None
    except (OSError, NetrcParseError):
        return False
