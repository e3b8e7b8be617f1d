"""Asynchronous against synchronous: wall time to the same steps and to the same reward.

    python tests/benchmarks/bench_async.py [--steps 100]

The synchronous run is the same code with `max_staleness: 0` and one generator; generation and
training then take turns, and each may use every core. Asynchronous, two generators and the learner
share the cores, one thread each. Workloads: responses of log-normal length whose longest is at
least eight times the mean, and short equal lengths, where asynchrony may gain nothing. The times
are those of the learner's own records, from the first step to the last: starting up is in neither.
One JSON line per workload; nobody imports this.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from streamrl.tracking.jsonl import read_metrics

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
WORKLOADS = {
    "long-tailed": {"min_length": 2, "max_length": 48, "tail": 1.0},
    "equal": {"min_length": 6, "max_length": 6},
}
WINDOW = 10

CONFIG = """
run: {{name: {name}, folder: {folder}, max_steps: {steps}, evaluate: false}}
model:
  path: {folder}/model-{workload}
  recipe:
    {{hidden_size: 64, intermediate_size: 192, num_layers: 2, alphabet: "0123456789c=",
     warm_start_accuracy: 0.35, lr: 3e-3}}
data:
  source: copy
  source_kwargs: {kwargs}
  max_prompt_length: {longest}
  num_eval_prompts: 8
generator:
  {{count: {generators}, group_size: 8, max_new_tokens: {longest}, max_num_seqs: 128,
   num_threads: {generator_threads}}}
buffer: {{url: "zmq://127.0.0.1:0", max_staleness: {staleness}}}
learner:
  groups_per_step: 8
  max_tokens_per_micro_batch: 8192
  num_threads: {learner_threads}
  optimizer: {{lr: 3e-4, warmup_steps: 5}}
  checkpoint: {{every: 1000}}
weights: {{address: "tcp://127.0.0.1:0"}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    cores = len(os.sched_getaffinity(0))
    modes = {
        "async": {"generators": 2, "generator_threads": 1, "learner_threads": 1, "staleness": 2},
        "sync": {
            "generators": 1,
            "generator_threads": cores,
            "learner_threads": cores,
            "staleness": 0,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            runs = {
                mode: run(Path(folder), workload, mode, steps, settings)
                for mode, settings in modes.items()
            }
            print(json.dumps({"benchmark": "async", "workload": workload, **compare(**runs)}))


def run(
    folder: Path, workload: str, mode: str, steps: int, settings: dict[str, int]
) -> list[dict[str, Any]]:
    """The metrics of every step of one launch."""
    name, kwargs = f"{workload}-{mode}", WORKLOADS[workload]
    path = folder / f"{name}.yaml"
    longest = int(kwargs["max_length"]) + 4
    path.write_text(
        CONFIG.format(
            name=name,
            folder=folder,
            steps=steps,
            workload=workload,
            kwargs=json.dumps(kwargs),
            longest=longest,
            **settings,
        )
    )
    command = [STREAMRL, "launch", str(path), "--no-view"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return read_metrics(folder / name / "metrics.jsonl")


def compare(**runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Synchronous over asynchronous seconds: above 1 where asynchrony gains."""
    seconds = {mode: lines[-1]["time_s"] - lines[0]["time_s"] for mode, lines in runs.items()}
    reached = min(max(rewards(lines)) for lines in runs.values())
    to_reward = {mode: seconds_to(lines, reached) for mode, lines in runs.items()}
    waiting = {
        f"{mode}_wait_s": round(sum(line["learner/wait_s"] for line in lines[1:]), 1)
        for mode, lines in runs.items()
    }
    return {
        "ratio": round(seconds["sync"] / seconds["async"], 2),
        "ratio_to_reward": round(to_reward["sync"] / to_reward["async"], 2),
        "reward": round(reached, 3),
        **{f"{mode}_s": round(value, 1) for mode, value in seconds.items()},
        **waiting,
        "async_staleness_mean": round(
            sum(line["buffer/staleness_mean"] for line in runs["async"]) / len(runs["async"]), 2
        ),
    }


def rewards(lines: list[dict[str, Any]]) -> list[float]:
    """Means over the last WINDOW steps."""
    values = [line["reward/mean"] for line in lines]
    return [sum(values[i : i + WINDOW]) / WINDOW for i in range(len(values) - WINDOW + 1)]


def seconds_to(lines: list[dict[str, Any]], reward: float) -> float:
    first = next(i for i, value in enumerate(rewards(lines)) if value >= reward)
    return float(lines[first + WINDOW - 1]["time_s"] - lines[0]["time_s"])


if __name__ == "__main__":
    main()
