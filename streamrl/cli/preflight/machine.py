"""Whether this machine has the devices, the packages and the folder that a run needs, and can keep
apart the programs of a model's that the run would start.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from actors.engines import find_engine
from actors.sandbox.isolation import Isolation, IsolationChoice, choose, why_not
from buffers.connect import require_redis
from streamrl.checkpoints.find import is_checkpoint, is_taken
from streamrl.cli.doctor.machine import read_machine
from streamrl.cli.doctor.packages import core_outside, needed_packages
from streamrl.cli.preflight.findings import Finding, fact, problem, refusal, warning
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.placement.assign import make_plan
from streamrl.placement.devices import torch_has_cuda
from streamrl.placement.hosts import hosts_of
from streamrl.placement.plan import Plan
from streamrl.placement.seats import counted

_HELD = {
    "namespaces": "programs have namespaces of their own",
    "landlock": "programs are held by Landlock and a filter of system calls; they can start no "
    "processes, and what they write to their folder is not bounded together",
    "none": "isolation is none: programs that a model wrote run with the files, processes and "
    "network of this user in reach",
}


def check_sandbox(config: RunConfig) -> Iterator[Finding]:
    """Runs one or two programs where the run has the reward `code` or the tool `python`."""
    known: tuple[IsolationChoice, ...] = get_args(IsolationChoice)
    for place, kwargs in _users(config):
        # What it was if it is none of them is said where the arguments are checked.
        for wanted in (name for name in known if name == kwargs.get("isolation", "auto")):
            try:
                yield _said(place, wanted, choose(wanted))
            except ConfigError as error:
                yield problem(f"{place}: {error}")


def _said(place: str, wanted: IsolationChoice, isolation: Isolation) -> Finding:
    sentence = f"{place}: {_HELD[isolation]}"
    if isolation == "none":
        return warning(sentence)
    if isolation == "landlock" and wanted == "auto":
        return warning(f"{sentence} (no namespaces: {why_not('namespaces')})")
    return fact(sentence)


def _users(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings that start programs, each with its arguments."""
    for entry in config.entries:
        alone = f"{entry.place}reward" if entry.place else "data.reward"
        name = f"{entry.place}data.rewards" if entry.data.rewards else alone
        for reward in entry.data.all_rewards:
            if reward.reward == "code":
                yield f"{name}: code", reward.kwargs
    for tool in config.generator.tools:
        if tool.tool == "python":
            yield "generator.tools: python", tool.kwargs


_FEW_BYTES = 200 * 2**20


def check_versions(config: RunConfig) -> Iterator[Finding]:
    """Whether the packages that StreamRL does not run without are of releases that it allows: an
    installation may have been told to pass over that."""
    for sentence in core_outside(needed_packages()):
        yield warning(f"{sentence}, which no test has run with; see streamrl doctor")


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
    """Whether there is a plan for the run's hosts, by the planner's own look-up."""
    why = "" if torch_has_cuda() else ": the installed torch is a build for CPUs"
    try:
        hosts = hosts_of(config)
    except ConfigError as error:
        yield warning(str(error))
        return
    try:
        plan = make_plan(config, hosts)
    except ConfigError as error:
        is_about_gpus = str(error).endswith("here")
        yield problem(f"{error}{why if is_about_gpus else ''}")
        return
    yield from _check_gpus_of_learner(config, plan, why)
    yield from _check_bfloat16(config, plan)
    yield from (warning(note) for note in plan.notes)
    yield fact(f"learner.device: {config.learner.device}, {counted(hosts)}")


def _check_gpus_of_learner(config: RunConfig, plan: Plan, why: str) -> Iterator[Finding]:
    """What asks for a GPU of the learner, where the hosts are known to have none for it."""
    learners = [process for process in plan.processes if process.role == "learner"]
    if any(process.devices for process in learners):
        return
    if not all(host.is_counted for host in plan.hosts):
        return
    is_told = config.learner.device == "cpu"
    lacks = "learner.device is cpu" if is_told else f"{counted(plan.hosts)}{why}"
    if config.weights.backend == "nccl":
        yield problem(f"weights.backend: nccl needs GPUs, and {lacks}")
    for name in config.learner.offload.chosen:
        yield problem(f"learner.offload.{name}: moves memory from a GPU to the host, and {lacks}")


def _check_bfloat16(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Whether the learner or the HF engine computes on a CPU in what that has no instructions for;
    other engines have kernels of their own."""
    if config.cluster.hosts or not read_machine().lacks_bfloat16:
        return
    on_cpu = {process.role for process in plan.processes if not process.devices}
    in_bfloat16 = {
        "learner": config.learner.dtype == "bfloat16",
        "generator": config.generator.dtype == "bfloat16" and config.generator.engine == "hf",
    }
    for role, is_so in in_bfloat16.items():
        if is_so and role in on_cpu:
            yield warning(
                f"{role}.dtype: was bfloat16, and this CPU has no instructions for it: float32 is "
                "several times faster here"
            )


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
    if isinstance(path, Path) and not (is_checkpoint(path) or is_taken(config.run.path, path)):
        yield problem(f"run.resume: {path} is no checkpoint (it has no state.json)")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(str(host)) is not None
    except (OSError, NetrcParseError):
        return False
