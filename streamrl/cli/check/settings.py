"""Checks for sizes that do not fit together and unwritable folders, and whether processes get the
devices that they need and fit into memory.

Invariant: only what cannot work is refused. The plan and its memory model are those of
`streamrl.placement`, which refuse a launch in the same words.

A warning means that something can work but often will not, such as groups that may not fit, or
short leases.
"""

from collections.abc import Iterator
from pathlib import Path

from streamrl.checkpoints.find import is_checkpoint, is_taken
from streamrl.cli.check.machine import read_machine, why_not_made
from streamrl.cli.processes.mirror import Mirror
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.errors import ConfigError
from streamrl.findings import CONFIGURATION, MEMORY, Finding
from streamrl.model_folder import local_folder
from streamrl.placement.hosts import this_machine, torch_has_cuda
from streamrl.placement.limits import expert_bytes, require_liger
from streamrl.placement.make_plan import make_plan
from streamrl.placement.memory import DoesNotFitError, Fit, LearnerMemory, ModelShape
from streamrl.placement.plan import Plan, gib
from streamrl.placement.seats import counted, devices_per_engine, seats

_SAFE_LEASE_S = 3.0


def check_sizes(config: RunConfig) -> Iterator[Finding]:
    buffer, longest = config.buffer, config.max_model_len
    folder = local_folder("model.path", config.model.path)
    of_experts = expert_bytes({} if folder is None else folder.config)
    num_kept = config.generator.top_k
    # Three bytes for an id, as for vocabularies of more than 65,536 tokens; none has 2**24.
    largest = config.group_bytes(longest, num_kept=num_kept, id_bytes=3, expert_bytes=of_experts)
    if largest > buffer.max_group_bytes:
        fitting = buffer.max_group_bytes * longest // largest
        yield CONFIGURATION.warning(
            f"buffer.max_group_bytes: {buffer.max_group_bytes} refuses groups whose trajectories "
            f"have more than about {fitting} tokens each, and generator.max_model_len allows "
            f"{longest}; set {largest + largest // 4}"
        )
    if buffer.lease_ttl_s < _SAFE_LEASE_S:
        yield CONFIGURATION.warning(
            f"buffer.lease_ttl_s: {buffer.lease_ttl_s:g} s: a generator that pauses for so long "
            "loses its groups"
        )
    yield from _long_trajectories(config)
    yield CONFIGURATION.ok(f"buffer.max_group_bytes: a group has at most {largest / 1e6:.3g} MB")


def _long_trajectories(config: RunConfig) -> Iterator[Finding]:
    """Warn about lengths of trajectories of several turns; those of one turn are bounded by the
    prompt and one completion."""
    limit = config.learner.max_tokens_per_micro_batch
    environments = sorted({entry.environment for entry in config.entries} - {"single_turn"})
    if environments and config.generator.max_model_len is None:
        yield CONFIGURATION.warning(
            f"generator.max_model_len: is not set, and leaves {config.max_model_len} tokens, of "
            f"one prompt and one completion: an episode of {environments[0]} ends, truncated, "
            "where its next turn would not fit; set it to the tokens of a whole episode"
        )
    if environments and config.max_model_len > limit:
        yield CONFIGURATION.warning(
            f"learner.max_tokens_per_micro_batch: was {limit}, and generator.max_model_len allows "
            f"trajectories of {config.max_model_len} tokens: those above the limit are trained "
            "each in a micro-batch of its own, which needs more memory"
        )


def check_engine_device(config: RunConfig) -> Iterator[Finding]:
    """vLLM and SGLang take the GPUs that they find, or a single GPU that the setting names."""
    generator = config.generator
    if generator.engine == "hf" or generator.vllm.url:
        return
    device, size = generator.device, devices_per_engine(generator)
    if device == "cpu" or (generator.url and device != "auto"):
        yield CONFIGURATION.problem(
            f"generator.device: was {device!r}, and {generator.engine} takes the devices that it "
            "finds: leave it out"
        )
    if ":" in device and size > 1:
        yield CONFIGURATION.problem(
            f"generator.device: was {device!r}, which is one GPU, and an engine of "
            f"{generator.engine} takes {size} by its own settings: leave it out, or name their "
            "kind, cuda"
        )


def check_folder(config: RunConfig) -> Iterator[Finding]:
    folder = config.run.path
    if why := why_not_made(folder):
        yield CONFIGURATION.problem(f"run.folder: {folder} cannot be made: {why}")
        return
    if config.run.folder_mirror is not None:
        yield from CONFIGURATION.refusal(lambda: Mirror(config, print).require_writable())
    yield CONFIGURATION.ok(f"run.folder: {folder} can be written")


def check_resume(config: RunConfig, where: str) -> Iterator[Finding]:
    """Check `run.resume`, which was set at `where`. The run's own file keeps the setting too, but
    there it is no order to go back again."""
    own = config.run.path / RESOLVED_FILE
    match config.run.resume:
        case Path() as path if is_taken(config.run.path, path):
            if Path(where.rpartition(":")[0]).absolute() != own.absolute():
                yield CONFIGURATION.warning(
                    f"run.resume: the run has gone on from {path} before, so --resume goes on from "
                    "its newest checkpoint",
                    remedy="to go back there once more, first move its later checkpoints away",
                )
        case Path() as path if not is_checkpoint(path):
            yield CONFIGURATION.problem(
                f"run.resume: {path} is no checkpoint (it has no state.json); name never, auto or "
                "the path of one"
            )


def check_devices(config: RunConfig) -> Iterator[Finding]:
    """Check with the planner itself that there is a plan for this machine, and what the processes
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
    on_gpu = any(process.devices for process in plan.processes if process.role == "generator")
    if on_gpu and config.generator.engine == "hf":
        yield CONFIGURATION.warning(
            "generator.engine: hf generates on a GPU, and is made for CPUs and tests: take vllm or "
            "sglang there"
        )
    yield from plan.notes
    yield from _needs(plan)
    yield from _without_gpu(config, plan)
    yield from _host_of_learner(config, plan)
    yield CONFIGURATION.ok(f"learner.device: {config.learner.device}, {counted(hosts)}")


def _needs(plan: Plan) -> Iterator[Finding]:
    """Yield what each process whose model is known needs on its GPUs."""
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


def _without_gpu(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Warn if the processes here that have no GPU certainly need more than this machine's memory;
    swap might do."""
    memory, placed = read_machine().usable_memory, seats(plan.config, plan.hosts)
    fit = Fit(config, placed, ModelShape.of(config), ModelShape.of_critic(config))
    if fit.shape is None or not memory:
        return
    needs: dict[str, int] = {}
    for seat in placed:
        if seat.devices or seat.host.name != "here":
            continue
        if seat.role == "learner" or fit.generator(seat).engine == "hf":
            of_ranks = (fit.need(seat, position) for position in range(seat.num_ranks))
            needs[seat.name] = sum(need.certain_bytes for need in of_ranks if need is not None)
    if sum(needs.values()) > memory:
        largest = max(needs, key=needs.__getitem__)
        fewer = "lower generator.count, or " if config.generator.count != 1 else ""
        yield MEMORY.warning(
            f"model.path: the processes without a GPU need at least {gib(sum(needs.values()))} of "
            f"memory ({largest} {gib(needs[largest])}), and this machine has {gib(memory)}: "
            f"{fewer}name a smaller model"
        )


def _host_of_learner(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Check the host memory that the learner's ranks here use for kept versions and teachers."""
    ranks = [process for process in plan.processes if process.role == "learner"]
    here = [rank for rank in ranks if rank.host == "here"]
    shape, memory = ModelShape.of(config), read_machine().usable_memory
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
    """Check settings that need a GPU for the learner, if the hosts are known to have none for
    it."""
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
    if config.learner.liger_layers is True:
        yield from CONFIGURATION.refusal(require_liger, f"{lacks}, not a GPU" if is_told else lacks)
    profiler = config.learner.profiler
    for name in ("memory", "nvtx"):
        if getattr(profiler, name):
            yield CONFIGURATION.problem(
                f"learner.profiler.{name}: was true, and {lacks}; it needs a GPU"
            )


def _check_bfloat16(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Warn if the learner or the HF engine computes in bfloat16 on a CPU without instructions for
    it; other engines have their own kernels."""
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
