"""What torch says of this machine: asked in a process of its own, which may be slow, or crash.

Invariant: torch is never imported here. Waits ANSWER_S for the process at most.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from streamrl.cli.doctor.findings import Finding, ok, problem, warn
from streamrl.placement.devices import driver_devices, is_rocm

ANSWER_S = 180.0
_OLDEST = (7, 0)

SCRIPT = """
import json
import torch
import torch.distributed as distributed

gpus, error = [], ""
try:
    for i in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(i)
        gpus.append({
            "name": known.name,
            "memory": known.total_memory,
            "capability": [known.major, known.minor],
            "peers": sum(
                torch.cuda.can_device_access_peer(i, j)
                for j in range(torch.cuda.device_count()) if j != i
            ),
        })
    if gpus:
        torch.ones(8, device="cuda").sum().item()
except Exception as raised:
    error = str(raised).splitlines()[0]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "is_available": torch.cuda.is_available(),
    "gloo": distributed.is_available() and distributed.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version()))
    if distributed.is_available() and distributed.is_nccl_available() else "",
    "gpus": gpus,
    "error": error,
}))
"""


class Gpu(msgspec.Struct, frozen=True):
    """`peers` are other GPUs whose memory it can read."""

    name: str
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    peers: int = 0


class TorchFacts(msgspec.Struct, frozen=True):
    """`cuda` and `hip` are the versions that the build is for; `error` is of a first kernel."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    is_available: bool = False
    gloo: bool = True
    nccl: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def ask_torch(script: str = SCRIPT, answer_s: float = ANSWER_S) -> TorchFacts | str:
    """The facts, or why there are none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=answer_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it has not been imported within {answer_s:g} s"
    except OSError as error:
        return str(error)
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchFacts)
    except (IndexError, msgspec.MsgspecError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"its process ended with exit code {done.returncode}"


def check_torch(facts: TorchFacts | str, num_driver_gpus: int | None) -> Iterator[Finding]:
    """`num_driver_gpus` are those that the driver counts; None where it cannot."""
    if isinstance(facts, str):
        remedy = "reinstall it: pip install --force-reinstall torch, of the build for this machine"
        yield problem("torch", f"torch cannot be imported: {facts}", remedy)
        return
    build = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "CPUs"
    yield ok("torch", f"torch {facts.version}, a build for {build}")
    if not facts.gloo:
        remedy = "install a build of torch with gloo, as those of pytorch.org are"
        yield problem("gloo", "torch has no gloo, which weights and ranks need", remedy)
    yield from _check_gpus(facts, num_driver_gpus)
    yield from _check_nccl(facts)


def _check_gpus(facts: TorchFacts, num_driver_gpus: int | None) -> Iterator[Finding]:
    if facts.error:
        yield problem(
            "gpus",
            f"a first kernel failed: {facts.error}",
            "look at nvidia-smi and dmesg; update a driver that is older than the build's CUDA, or "
            "take an older build of torch",
        )
    elif num_driver_gpus and not (facts.cuda or facts.hip):
        sentence = f"the driver has {num_driver_gpus} GPUs, and torch is a build for CPUs"
        yield problem("gpus", sentence, "pip install torch, of a build for CUDA, from pytorch.org")
    elif num_driver_gpus and not facts.gpus:
        sentence = f"the driver has {num_driver_gpus} GPUs, and torch sees none of them"
        remedy = f"update the driver to one for CUDA {facts.cuda}; see CUDA_VISIBLE_DEVICES"
        yield problem("gpus", sentence, remedy)
    elif not facts.gpus:
        yield ok("gpus", "no GPU: everything runs on the CPU")
    else:
        yield from _describe(facts.gpus)


def _describe(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    names = sorted({f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in gpus})
    yield ok("gpus", f"{len(gpus)} GPUs: {', '.join(names)}")
    if old := sorted({gpu.name for gpu in gpus if gpu.capability < _OLDEST}):
        remedy = "use GPUs of compute capability 7.0 or newer, bfloat16 needs 8.0"
        yield warn("gpus", f"{', '.join(old)}: too old for current builds of torch", remedy)
    if any(gpu.peers < len(gpus) - 1 for gpu in gpus):
        yield warn(
            "peer access",
            "not every GPU can read the memory of every other one: NCCL copies through the host",
            "look at nvidia-smi topo -m; in a virtual machine turn off ACS, or set "
            "NCCL_P2P_DISABLE=1 where it hangs",
        )


def _check_nccl(facts: TorchFacts) -> Iterator[Finding]:
    if facts.gpus and not facts.nccl:
        remedy = "install a build of torch with NCCL, or set weights.backend: gloo"
        yield warn("nccl", "torch has no NCCL: ranks and weights go over gloo", remedy)
    elif facts.nccl:
        yield ok("nccl", f"NCCL {facts.nccl}")


def driver_gpus() -> int | None:
    """In this process, by the driver's own library; None for GPUs that it does not count."""
    return None if is_rocm() else len(driver_devices())
