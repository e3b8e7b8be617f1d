"""What the runs of bench_async have in common, and what sets them apart."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.async_runs.spans import ALPHABET, TURN

PER_BUCKET = 256
GROUP_SIZE = 8
GROUPS_PER_STEP = 16
MAX_PROMPT_LENGTH = 4
LR = 2e-4
WARMUP_STEPS = 10
# Most groups are nearly all right or all wrong, and the scale would amplify the odd response.
SCALES_ADVANTAGES = False
# Beyond the longest answer, so that a response that is too long differs from a right one.
SPARE_TOKENS = 4

RECIPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 2,
    "alphabet": ALPHABET,
    "lr": 3e-3,
}


@dataclass(frozen=True)
class Workload:
    """Arguments of `Spans`, the sampled exact match at which the warm start of the model ends, and
    the buckets (shortest, longest) of held-out answer lengths."""

    name: str
    kwargs: Mapping[str, Any]
    warm_start_accuracy: float
    buckets: tuple[tuple[int, int], ...]

    @property
    def max_new_tokens(self) -> int:
        return int(self.kwargs["max_length"]) + SPARE_TOKENS

    @property
    def bucket_names(self) -> tuple[str, ...]:
        return tuple(f"{shortest}-{longest}" for shortest, longest in self.buckets)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "long-tailed",
            {"min_length": 4, "max_length": 96, "tail": 1.6},
            0.9,
            ((4, 10), (11, TURN), (TURN + 1, 96)),
        ),
        Workload("equal", {"min_length": 6, "max_length": 6}, 0.5, ((6, 6),)),
    )
}


@dataclass(frozen=True)
class Mode:
    """Processes, their threads, `buffer.overdue` and `buffer.max_staleness`."""

    name: str
    generators: int
    generator_threads: int
    learner_threads: int
    overdue: str
    max_staleness: int


def modes(policies: Sequence[str], bounds: Sequence[int]) -> Iterator[Mode]:
    """The two synchronous modes, then every policy with every bound."""
    cores = len(os.sched_getaffinity(0))
    yield Mode("sync_one_engine", 1, cores, cores, "wait", 0)
    yield Mode("sync_more_engines", cores, 1, cores, "wait", 0)
    for policy in policies:
        for bound in bounds:
            yield Mode(f"{policy}_{bound}", 2, 1, 1, policy, bound)


def configuration(
    folder: str, workload: Workload, mode: Mode, *, seed: int, steps: int, checkpoints: int
) -> dict[str, Any]:
    """The configuration of one run, whose folder is `name_of(...)` in `folder`."""
    name = name_of(workload, mode.name, seed)
    recipe = {**RECIPE, "warm_start_accuracy": workload.warm_start_accuracy}
    task = os.path.join(os.path.dirname(__file__), "spans.py")
    return {
        "run": {
            **{"name": name, "folder": folder, "seed": seed},
            **{"max_steps": steps, "evaluate": False},
        },
        "model": {"path": f"{folder}/model-{workload.name}-{seed}", "recipe": recipe},
        "data": {
            "source": f"{task}:Spans",
            "source_kwargs": dict(workload.kwargs),
            "reward": f"{task}:exact_match",
            "reward_kwargs": {"log": f"{folder}/{name}.sampled.jsonl"},
            "max_prompt_length": MAX_PROMPT_LENGTH,
        },
        "generator": {
            "count": mode.generators,
            "group_size": GROUP_SIZE,
            "max_new_tokens": workload.max_new_tokens,
            "max_num_seqs": GROUP_SIZE * GROUPS_PER_STEP,
            "num_threads": mode.generator_threads,
        },
        "buffer": {
            "url": "zmq://127.0.0.1:0",
            "max_staleness": mode.max_staleness,
            "overdue": mode.overdue,
        },
        "algorithm": {"advantage_config": {"norm_adv_by_std": SCALES_ADVANTAGES}},
        "learner": {
            "groups_per_step": GROUPS_PER_STEP,
            "max_tokens_per_micro_batch": 8192,
            "num_threads": mode.learner_threads,
            "optimizer": {"lr": LR, "warmup_steps": WARMUP_STEPS},
            "checkpoint": {"every": -(-steps // checkpoints), "keep": checkpoints},
        },
        "weights": {"address": "tcp://127.0.0.1:0"},
    }


def name_of(workload: Workload, mode_name: str, seed: int) -> str:
    return f"{workload.name}-{mode_name}-{seed}"
