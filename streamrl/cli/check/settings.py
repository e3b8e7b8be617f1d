"""Deadlines below what they wait for, sizes that do not go together, folders that are not writable.

Invariant: refused is only what cannot work. The speed of a copy is this machine's;
no network and no device of another machine is faster than `_GPU_BYTES_PER_S`.

Warned of is what can work and often will not (groups that do not fit, leases that are short), and a
setting that was given and cannot act in this run, since nothing else tells.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from streamrl.checkpoints.find import is_checkpoint, is_taken
from streamrl.cli.processes.mirror import Mirror
from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.findings import CONFIGURATION, Finding
from streamrl.model_folder import local_folder
from streamrl.placement.devices import torch_has_cuda
from streamrl.placement.limits import expert_bytes
from streamrl.placement.memory import ModelShape
from streamrl.placement.seats import devices_per_engine

_SAFE_LEASE_S = 3.0


def check_sizes(config: RunConfig) -> Iterator[Finding]:
    buffer, longest = config.buffer, config.max_model_len
    folder = local_folder("model.path", config.model.path)
    of_experts = expert_bytes({} if folder is None else folder.config)
    num_kept = config.generator.top_k
    largest = config.group_bytes(longest, num_kept=num_kept, expert_bytes=of_experts)
    if largest > buffer.max_group_bytes:
        fitting = buffer.max_group_bytes * longest // largest
        yield CONFIGURATION.warning(
            f"buffer.max_group_bytes: {buffer.max_group_bytes} refuses groups whose trajectories "
            f"have more than about {fitting} tokens each, and generator.max_model_len allows "
            f"{longest}; set {largest + largest // 8}"
        )
    if buffer.lease_ttl_s < _SAFE_LEASE_S:
        yield CONFIGURATION.warning(
            f"buffer.lease_ttl_s: {buffer.lease_ttl_s:g} s: a generator that pauses for so long "
            "loses its groups"
        )
    yield from _long_trajectories(config)
    yield CONFIGURATION.ok(f"buffer.max_group_bytes: a group has at most {largest / 1e6:.3g} MB")


def _long_trajectories(config: RunConfig) -> Iterator[Finding]:
    """Of several turns; those of one turn are bounded by the prompt and one completion."""
    limit = config.learner.max_tokens_per_micro_batch
    environments = {entry.environment for entry in config.entries}
    if environments != {"single_turn"} and config.max_model_len > limit:
        yield CONFIGURATION.warning(
            f"learner.max_tokens_per_micro_batch: was {limit}, and generator.max_model_len allows "
            f"trajectories of {config.max_model_len} tokens: those above the limit are trained "
            "each in a micro-batch of its own, which needs more memory"
        )


def check_effects(config: RunConfig) -> Iterator[Finding]:
    """Settings that nothing reads beside the others of this configuration."""
    generator, reward = config.generator, config.algorithm.reward
    yield from _check_device(generator)
    environments = {entry.environment for entry in config.entries}
    if reward.format_penalty and environments == {"single_turn"}:
        yield CONFIGURATION.problem(
            f"algorithm.reward.format_penalty: was {reward.format_penalty:g}, and environment "
            "single_turn has no form that a turn could break, so it counts no invalid turns; the "
            "others do"
        )
    is_alone = len(config.entries) == 1
    if is_alone and reward.agentic is not None and reward.agentic.grouping == "inductive":
        yield CONFIGURATION.problem(
            "algorithm.reward.agentic.grouping: was 'inductive', which compares the episodes of "
            "one environment, and this run has one: batch does the same"
        )


def _check_device(generator: GeneratorSettings) -> Iterator[Finding]:
    """vLLM and SGLang take GPUs where they find some; one of them, if the setting names it."""
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


ANSWER_S = 0.05
"""What a daemon takes at least to answer beside its work."""
_GPU_BYTES_PER_S = 1e12
_COPIED_BYTES = 32 * 2**20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def check_limits(config: RunConfig) -> Iterator[Finding]:
    """Copies some memory to learn how fast that is."""
    yield from _check_update(config)
    yield from _check_deadlines(config)


def _check_update(config: RunConfig) -> Iterator[Finding]:
    """An update takes a copy of the model's bytes at least."""
    num_bytes, given = _update_bytes(config), config.weights.deadline_s
    copies_here = not torch_has_cuda() or config.learner.device == "cpu"
    speed = memory_bytes_per_s() if copies_here else _GPU_BYTES_PER_S
    whose = "this machine's memory" if copies_here else "the fastest GPUs"
    needed = _update_s(config, num_bytes / speed)
    shortest_s = num_bytes / speed + ANSWER_S
    takes = (
        f"an update of {num_bytes / 1e6:.3g} MB takes at least {shortest_s:.2g} s: "
        f"a copy at {speed / 1e9:.3g} GB/s, the speed of {whose}, and {ANSWER_S:g} s until the "
        "generator answers"
    )
    if given < needed:
        yield CONFIGURATION.problem(
            f"weights.deadline_s: was {given:g} s, and {takes}, and each hop has a part of the "
            f"deadline; it must be at least {needed:.2g}, and {_round(10 * needed):g} leaves room"
        )
    elif given < 4 * needed:
        yield CONFIGURATION.warning(
            f"weights.deadline_s: was {given:g} s, and {takes}: generators that take "
            f"{given / needed:.2g} times as long are left out of updates"
        )
    else:
        yield CONFIGURATION.ok(f"weights.deadline_s: {takes}")


def _update_s(config: RunConfig, copy_s: float) -> float:
    """The shortest deadline: `streamrl.weights.sender` has the parts of it."""
    if config.weights.transport == "files":
        return ANSWER_S + copy_s
    return max(4 * ANSWER_S, 2 * (ANSWER_S + copy_s))


def _check_deadlines(config: RunConfig) -> Iterator[Finding]:
    generator = config.generator
    engine = generator.engine
    starts_server = engine in ("vllm", "sglang") and generator.url is None
    turn_s = generator.episode.turn_deadline_s
    shortest = [
        ("buffer.deadline_s", config.buffer.deadline_s, ANSWER_S, "an answer of the buffer takes"),
        (
            "generator.group_deadline_s",
            generator.group_deadline_s,
            ANSWER_S,
            "the first token of an episode takes",
        ),
    ]
    if turn_s is not None:
        name = "generator.episode.turn_deadline_s"
        shortest.append((name, turn_s, ANSWER_S, "the first token of a turn takes"))
    if starts_server:
        start_s = generator.served.start_timeout_s
        name = f"generator.{engine}.start_timeout_s"
        shortest.append((name, start_s, 5.0, "a server's start takes"))
    if config.learner.num_ranks > 1:
        rank_s = config.learner.rank_deadline_s
        shortest.append(("learner.rank_deadline_s", rank_s, 2.0, "two reports of a rank take"))
    for name, given, needed, what in shortest:
        if given < needed:
            yield CONFIGURATION.problem(
                f"{name}: was {given:g} s, and {what} longer; it must be at least {needed:g}"
            )


def _update_bytes(config: RunConfig) -> int:
    """0 where the model is not here, or only a part of it is sent."""
    shape = ModelShape.of(config)
    if shape is None or config.learner.lora is not None or config.weights.delta:
        return 0
    return shape.num_parameters * _BYTES[config.weights.dtype or config.learner.dtype]


@cache
def memory_bytes_per_s() -> float:
    """Of the fastest of three copies."""
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return _COPIED_BYTES / max(min(times), 1e-6)


def _round(seconds: float) -> float:
    """Up to a whole second."""
    return float(-(-seconds // 1))


def check_folder(config: RunConfig) -> Iterator[Finding]:
    """Whether the run's folder can be made and written, by writing beside it."""
    folder = config.run.path
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield CONFIGURATION.problem(f"run.folder: {existing} is a file, so {folder} cannot be made")
        return
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        yield CONFIGURATION.problem(f"run.folder: cannot write to {existing}: {error.strerror}")
        return
    if config.run.folder_mirror is not None:
        yield from CONFIGURATION.refusal(lambda: Mirror(config, print).require_writable())
    status = os.statvfs(existing)
    num_bytes = status.f_bavail * status.f_frsize
    yield from _check_resume(config)
    yield CONFIGURATION.ok(f"run.folder: {folder} can be written, {num_bytes / 1e9:.3g} GB free")


def _check_resume(config: RunConfig) -> Iterator[Finding]:
    path = config.run.resume
    if isinstance(path, Path) and not (is_checkpoint(path) or is_taken(config.run.path, path)):
        yield CONFIGURATION.problem(f"run.resume: {path} is no checkpoint (it has no state.json)")
