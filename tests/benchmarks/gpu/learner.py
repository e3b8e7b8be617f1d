"""Steps of a learner's Trainer beside a plain trainer of the same trajectories, on one device.

    PYTHONPATH=. python tests/benchmarks/gpu/learner.py [--small] [--budget-s 150]

The plain trainer does what one writes first: right-padded micro-batches in the order of the batch,
autocast over float32 weights, sdpa, logits of the response columns, log_softmax, AdamW. Models have
the shapes of Qwen2.5 and random weights; trajectories have log-normal lengths. One JSON line a case
with `tokens_per_s`, `mfu` (`learner/mfu`), `peak_gb` of the device and the ratio to the plain
trainer of the same load, which comes first; a case that fails says why, and one that the budget
leaves no time for says that. `--small` is a tiny shape on a CPU. report.py runs it.
"""

import argparse
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from learners.batch.training_batch import TrainingBatch
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.types import Trajectory, TrajectoryGroup
from tests.benchmarks.learner_runs.passes import make_trajectory, padded_batches

_QWEN = {"vocab_size": 151_936, "num_key_value_heads": 2}
SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "0.5B": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True)
class Load:
    """Groups of trajectories, and how many tokens, or padded trajectories, share a pass."""

    shape: str
    num_groups: int
    group_size: int
    num_prompt: int
    median: int
    longest: int
    max_tokens: int
    num_padded: int


LOADS = (
    Load("0.5B", 64, 8, 110, 250, 1024, max_tokens=16_384, num_padded=16),
    Load("1.5B", 32, 8, 110, 250, 1024, max_tokens=16_384, num_padded=16),
    Load("0.5B", 8, 8, 200, 3000, 8000, max_tokens=16_384, num_padded=2),
)
SMALL_LOADS = (Load("tiny", 4, 4, 10, 20, 60, max_tokens=200, num_padded=4),)


@dataclass(frozen=True)
class Case:
    """Settings of `learner` in which a case differs; None is the plain trainer."""

    name: str
    learner: dict[str, Any] | None = field(default_factory=dict)
    needs_gpu: bool = False


CASES = (
    Case("plain", None),
    Case("default"),
    Case("compile", {"compile": True}, needs_gpu=True),
    Case("liger", {"liger_layers": True}, needs_gpu=True),
    Case("recompute", {"gradient_checkpointing": True}),
    Case(
        "offload",
        {"gradient_checkpointing": True, "offload": {"activations": True}},
        needs_gpu=True,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budget-s", type=float, default=150.0)
    options = parser.parse_args()
    if options.small:
        torch.set_num_threads(1)
    deadline = time.monotonic() + options.budget_s
    device = "cpu" if options.small else "cuda:0"
    for load in SMALL_LOADS if options.small else LOADS:
        run_load(load, device, deadline)


def run_load(load: Load, device: str, deadline: float) -> None:
    groups = make_groups(load)
    num_tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
    plain_s = math.nan
    with tempfile.TemporaryDirectory() as folder:
        make_model(load.shape).save_pretrained(folder)
        for case in CASES:
            about = {"benchmark": "gpu_learner", "shape": load.shape, "median": load.median}
            line: dict[str, Any] = {**about, "case": case.name, "tokens": num_tokens}
            if time.monotonic() > deadline:
                line["skipped"] = "no time left"
            elif case.needs_gpu and device == "cpu":
                line["skipped"] = "needs a GPU"
            elif "liger_layers" in (case.learner or {}) and find_spec("liger_kernel") is None:
                line["skipped"] = "liger-kernel is not installed"
            else:
                line |= measured(case, load, groups, Path(folder), device)
            if "step_s" in line:
                plain_s = line["step_s"] if case.learner is None else plain_s
                line["tokens_per_s"] = round(num_tokens / line["step_s"])
                line["ratio"] = round(plain_s / line["step_s"], 2)
            print(json.dumps(line), flush=True)
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()


def measured(
    case: Case, load: Load, groups: Sequence[TrajectoryGroup], folder: Path, device: str
) -> dict[str, Any]:
    """Seconds of the first and of a later step; the error of a case that fails."""
    try:
        if case.learner is None:
            return timed(plain_step(load, groups, folder, device), device)
        return timed(our_step(case.learner, load, groups, folder, device), device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def timed(step: Callable[[], dict[str, float]], device: str) -> dict[str, Any]:
    seconds, metrics = [], {}
    for _ in range(3):
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        metrics = step()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = {} if device == "cpu" else {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}
    names = ("mfu", "forward_s", "backward_s")
    figures = {n: round(metrics[f"learner/{n}"], 4) for n in names if f"learner/{n}" in metrics}
    best = round(min(seconds[1:]), 4)
    return {"first_s": round(seconds[0], 2), "step_s": best, **peak, **figures}


def our_step(
    learner: dict[str, Any],
    load: Load,
    groups: Sequence[TrajectoryGroup],
    folder: Path,
    device: str,
) -> Callable[[], dict[str, float]]:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"source": "addition", "max_prompt_length": load.num_prompt},
            "generator": {"max_new_tokens": load.longest, "group_size": load.group_size},
            "algorithm": {"advantage": "grpo", "loss": "ppo", "rollout_is": "token_is"},
            "learner": {
                "device": device,
                "dtype": "float32" if device == "cpu" else "bfloat16",
                "max_tokens_per_micro_batch": load.max_tokens,
                "optimizer": {"lr": 1e-6},
                **learner,
            },
        }
    )
    trainer = Trainer(config, Policy.from_config(config))
    batch = TrainingBatch.of(groups, policy_version=1)
    return lambda: trainer.step(batch)


def plain_step(
    load: Load, groups: Sequence[TrajectoryGroup], folder: Path, device: str
) -> Callable[[], dict[str, float]]:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device != "cpu")
    trajectories = [t for group in groups for t in group.trajectories]

    def loss(ids: torch.Tensor, seen: torch.Tensor, is_response: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device != "cpu"):
            kept = ids.shape[1] - load.num_prompt + 1
            logits = model(input_ids=ids, attention_mask=seen, logits_to_keep=kept).logits[:, :-1]
        targets = ids[:, load.num_prompt :, None]
        # A row at a time: float32 logits of all rows would not fit beside the model.
        rows = [
            row.float().log_softmax(-1).gather(-1, ids_of_row)[:, 0]
            for row, ids_of_row in zip(logits, targets, strict=True)
        ]
        return -(torch.stack(rows) * is_response[:, load.num_prompt :]).sum() / 1e5

    def step() -> dict[str, float]:
        for columns in padded_batches(trajectories, load.num_padded):
            loss(*(column.to(device) for column in columns)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {}

    return step


def make_model(shape: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=8192)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def make_groups(load: Load) -> tuple[TrajectoryGroup, ...]:
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[load.shape]["vocab_size"]

    def sibling(prompt: np.ndarray) -> Trajectory:
        drawn = rng.lognormal(math.log(load.median), 0.8)
        response = rng.integers(0, vocabulary, int(np.clip(drawn, 8, load.longest)))
        return make_trajectory(prompt, response, reward=float(rng.random() < 0.5), logprob=-11.9)

    made = []
    for index in range(load.num_groups):
        prompt = rng.integers(0, vocabulary, load.num_prompt)
        siblings = tuple(sibling(prompt) for _ in range(load.group_size))
        made.append(
            TrajectoryGroup(
                group_id=str(index),
                prompt_index=index,
                environment="benchmark",
                trajectories=siblings,
            )
        )
    return tuple(made)


if __name__ == "__main__":
    main()
