"""The learner's forward and backward passes against plain ones, in one run.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/bench_learner.py \
        [--cases padding,precision,memory,siblings]

- `padding`: packed against right-padded trajectories of log-normal length, tokens/s that are no
  padding, on a small Llama with random weights.
- `precision`: bfloat16 against float32, SmolLM2-135M's shape with random weights. It says whether
  the CPU has AMX, without which bfloat16 is not faster.
- `memory`: peak extra memory of a pass against the plain way, with logits of every position; the
  same shape.
- `siblings`: groups of 8 with a prompt of 100 tokens, siblings side by side and their prompt
  computed once, against balanced micro-batches in which each computes its own.

All in float32 but what says bfloat16, on one thread, each contender by turns in processes of its
own. Seconds are those of the CPU, the best of several. The gradients of packed and padded
trajectories are compared, too (`gradient_gap`, of the largest). `peers/steps.py` compares whole
steps with TRL's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from measure import contest, measured

from tests.benchmarks.learner_runs.passes import LOADS, Packed, Padded, gradient_gap, make_batch

CONTENDERS = {
    "padding": ("packed", "padded"),
    "precision": ("bfloat16", "float32"),
    "memory": ("packed", "padded"),
    "siblings": ("together", "apart"),
}
TARGETS = {"padding": 1.5, "precision": 2.2, "memory": 1.0, "siblings": 1.0}
REPEATS, ROUNDS = 2, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CONTENDERS))
    parser.add_argument("--only")
    parser.add_argument("--case")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(1)
        compute = work(options.case, options.only)
        print(json.dumps(measured(compute, options.repeats, time.process_time)))
        return
    for case in options.cases.split(","):
        print(json.dumps(line(case)), flush=True)


def work(case: str, contender: str) -> Packed | Padded:
    load = LOADS[case]
    if contender == "padded":
        return Padded(load)
    dtype = "bfloat16" if contender == "bfloat16" else "float32"
    return Packed(load, dtype, shares_prompts=contender != "apart")


def line(case: str) -> dict[str, Any]:
    """One case's figures; its ratio is how much better the first contender is."""
    ours, other = CONTENDERS[case]
    is_memory = case == "memory"
    figures = contest(
        __file__,
        (ours, other),
        *("--case", case),
        threads=1,
        repeats=REPEATS,
        rounds=0 if is_memory else ROUNDS,
        with_peaks=is_memory,
    )
    figure = "extra_mib" if is_memory else "seconds"
    num_tokens = sum(make_batch(LOADS[case]).lengths)
    return {
        "benchmark": "learner",
        "case": case,
        **{"tokens": num_tokens, "has_amx": has_amx()},
        "ratio": round(figures[other][figure] / figures[ours][figure], 2),
        "target": TARGETS[case],
        **({"gradient_gap": gradient_gap(LOADS[case])} if case == "padding" else {}),
        **figures,
    }


def has_amx() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in tiles; False where that is not known."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


if __name__ == "__main__":
    main()
