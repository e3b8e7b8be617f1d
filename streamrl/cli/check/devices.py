"""Whether the processes of a run get the devices that they need, and fit into the memory of these
and of this machine.

Invariant: there is one plan and one model of its memory (`streamrl.placement`), which refuses a
launch in the same words.
"""

from collections.abc import Iterator

from streamrl.cli.check.machine import read_machine
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.errors import ConfigError
from streamrl.findings import CONFIGURATION, MEMORY, Finding
from streamrl.placement.assign import make_plan
from streamrl.placement.devices import torch_has_cuda
from streamrl.placement.hosts import this_machine
from streamrl.placement.memory import DoesNotFitError, LearnerMemory, ModelShape
from streamrl.placement.plan import Plan, gib
from streamrl.placement.seats import counted


def check_devices(config: RunConfig) -> Iterator[Finding]:
    """Whether there is a plan for this machine, by the planner's own look-up, and what processes
    need of their GPUs."""
    why = "" if torch_has_cuda() else ": the installed torch is a build for CPUs"
    hosts = [this_machine()]
    try:
        plan = make_plan(config, hosts)
    except DoesNotFitError as error:
        yield MEMORY.problem(str(error))
        return
    except ConfigError as error:
        is_about_gpus = str(error).endswith("here")
        yield CONFIGURATION.problem(f"{error}{why if is_about_gpus else ''}")
        return
    yield from _check_gpus_of_learner(config, plan, why)
    yield from _check_bfloat16(config, plan)
    yield from _check_engine(config, plan)
    yield from plan.notes
    yield from _needs(plan)
    yield from _host_of_learner(config, plan)
    yield CONFIGURATION.ok(f"learner.device: {config.learner.device}, {counted(hosts)}")


def _needs(plan: Plan) -> Iterator[Finding]:
    """Of each process whose model is known, on its GPUs."""
    for process in plan.processes:
        if process.memory is not None:
            need, devices = process.memory, ", ".join(map(str, process.devices))
            gpus = f"each of GPUs {devices}" if len(process.devices) > 1 else f"GPU {devices}"
            where = "here" if process.host == "here" else f"of {process.host}"
            yield MEMORY.ok(
                f"{process.name} needs about {gib(need.num_bytes)} on {gpus} {where}: "
                f"{need.describe()}",
                cause=process.name,
            )


def _host_of_learner(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """What versions and teachers that the learner's ranks here keep take of this machine."""
    ranks = [process for process in plan.processes if process.role == "learner"]
    here = [rank for rank in ranks if rank.host == "here"]
    shape, memory = ModelShape.of(config), _memory()
    if shape is None or not here:
        return
    of_rank = LearnerMemory(config, shape, len(ranks))
    parts = of_rank.on_host(on_cpu=not any(rank.devices for rank in here))
    need = len(here) * sum(part.num_bytes for part in parts)
    if not need:
        return
    names = " and ".join(part.name for part in parts)
    sentence = f"learner: its {names} take {gib(need)} of this machine's memory"
    if memory and need > memory:
        yield MEMORY.problem(
            f"{sentence}, which has {gib(memory)}: lower buffer.max_staleness, set "
            "algorithm.rescore_share 0, or name a smaller teacher"
        )
        return
    yield MEMORY.ok(sentence)


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
        yield CONFIGURATION.problem(f"weights.backend: nccl needs GPUs, and {lacks}")
    for name in config.learner.offload.chosen:
        yield CONFIGURATION.problem(
            f"learner.offload.{name}: moves memory from a GPU to the host, and {lacks}"
        )
    profiler = config.learner.profiler
    for name in ("memory", "nvtx"):
        if getattr(profiler, name):
            yield CONFIGURATION.problem(
                f"learner.profiler.{name}: was true, and {lacks}; it needs a GPU"
            )


def _check_bfloat16(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Whether the learner or the HF engine computes on a CPU in what that has no instructions for;
    other engines have kernels of their own."""
    if not read_machine().lacks_bfloat16:
        return
    on_cpu = {process.role for process in plan.processes if not process.devices}
    in_bfloat16 = {
        "learner": config.learner.dtype == "bfloat16",
        "generator": config.generator.dtype == "bfloat16" and config.generator.engine == "hf",
    }
    for role, is_so in in_bfloat16.items():
        if is_so and role in on_cpu:
            yield CONFIGURATION.warning(
                f"{role}.dtype: was bfloat16, and this CPU has no instructions for it: float32 is "
                "several times faster here"
            )


def _check_engine(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    on_gpu = any(process.devices for process in plan.processes if process.role == "generator")
    if on_gpu and config.generator.engine == "hf":
        yield CONFIGURATION.warning(
            "generator.engine: hf generates on a GPU, and is made for CPUs and tests: take vllm or "
            "sglang there"
        )


def check_host_memory(config: RunConfig) -> Iterator[Finding]:
    """What the buffer holds, and its batches, where that is this machine's memory."""
    memory = _memory()
    if not (memory and _buffers_here(config)):
        return
    buffer, num_groups = config.buffer, config.learner.groups_per_step
    has = f"this machine has {memory / 2**30:.3g} GiB of memory"
    if buffer.max_group_bytes > memory:
        yield MEMORY.problem(
            f"buffer.max_group_bytes: was {buffer.max_group_bytes}, and {has}, which no group may "
            f"exceed; it must be at most {memory}"
        )
    smallest = config.group_bytes(1 + max(1, config.generator.min_new_tokens))
    if num_groups * smallest > memory:
        yield MEMORY.problem(
            f"learner.groups_per_step: was {num_groups}, and no batch can be filled: the smallest "
            f"group has {smallest} bytes, and {has}, where at most {memory // smallest} are "
            "admitted"
        )
    kv_bytes = config.generator.vllm.kv_cache_memory_bytes
    is_on_cpu = config.generator.engine == "vllm" and not torch_has_cuda()
    if is_on_cpu and kv_bytes is not None and kv_bytes > memory:
        yield MEMORY.problem(
            f"generator.vllm.kv_cache_memory_bytes: was {kv_bytes}, and {has}; it must be at most "
            f"{memory}"
        )


def _buffers_here(config: RunConfig) -> bool:
    """Whether groups are held in this machine's memory."""
    buffer = config.buffer
    return buffer.binds_url and is_loopback(buffer.url)


def _memory() -> int:
    """What processes here may have together, in bytes; 0 if that is not known."""
    machine = read_machine()
    return min(machine.memory, machine.memory_limit or machine.memory)
