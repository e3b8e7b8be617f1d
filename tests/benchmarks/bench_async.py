"""Asynchronous against synchronous: wall time to the same steps and to the same reward.

    python tests/benchmarks/bench_async.py [--steps 200]

The synchronous runs are the same code with `max_staleness: 0`: generation and training alternate,
and each uses every core, generation as one engine of as many threads or as many engines of one
thread; asynchrony is compared with the faster of the two. In the asynchronous run two generators
and the learner share the cores, one thread each. Workloads: responses of log-normal length whose
longest is at least eight times the mean, and short equal lengths, where asynchrony may gain
nothing. Times are from the learner's metrics, from the first step to the last, without startup.
Prints one JSON line per workload.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.tracking.jsonl import read_metrics

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
WORKLOADS = {
    "long-tailed": {"min_length": 3, "max_length": 160, "tail": 1.3},
    "equal": {"min_length": 6, "max_length": 6},
}
WINDOW = 20

Line = dict[str, Any]

CONFIG = """
run: {{name: {name}, folder: {folder}, max_steps: {steps}, evaluate: false}}
model:
  path: {folder}/model-{workload}
  recipe:
    {{hidden_size: 64, intermediate_size: 192, num_layers: 2, alphabet: "0123456789c=",
     warm_start_accuracy: 0.3, lr: 3e-3}}
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
  groups_per_step: 16
  max_tokens_per_micro_batch: 8192
  num_threads: {learner_threads}
  optimizer: {{lr: 5e-4, warmup_steps: 10}}
  checkpoint: {{every: 1000}}
weights: {{address: "tcp://127.0.0.1:0"}}
"""


@dataclass(frozen=True)
class Mode:
    """Processes, their threads, and `max_staleness`."""

    generators: int
    generator_threads: int
    learner_threads: int
    staleness: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    cores = len(os.sched_getaffinity(0))
    modes = {
        "async": Mode(generators=2, generator_threads=1, learner_threads=1, staleness=2),
        "sync_one_engine": Mode(1, cores, cores, staleness=0),
        "sync_more_engines": Mode(cores, 1, cores, staleness=0),
    }
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            runs = {
                name: run(Path(folder), workload, name, steps, mode) for name, mode in modes.items()
            }
            print(json.dumps({"benchmark": "async", "workload": workload, **compare(runs)}))


def run(folder: Path, workload: str, mode_name: str, steps: int, mode: Mode) -> list[Line]:
    """The metrics of every step of one launch."""
    name, kwargs = f"{workload}-{mode_name}", WORKLOADS[workload]
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
            **asdict(mode),
        )
    )
    command = [STREAMRL, "launch", str(path), "--no-view"]
    launch = subprocess.run(command, capture_output=True, text=True, check=False)
    if launch.returncode:
        raise SystemExit(launch.stdout + launch.stderr)
    return read_metrics(folder / name / "metrics.jsonl")


def compare(runs: dict[str, list[Line]]) -> dict[str, Any]:
    """Synchronous over asynchronous seconds, the faster synchronous run each time."""
    asynchronous = runs["async"]
    synchronous = [lines for name, lines in runs.items() if name != "async"]
    reached = min(max(rewards(lines)) for lines in runs.values())
    to_reward = {name: seconds_to(lines, reached) for name, lines in runs.items()}
    fastest = min(seconds(lines) for lines in synchronous)
    earliest = min(value for name, value in to_reward.items() if name != "async")
    return {
        "ratio": round(fastest / seconds(asynchronous), 2),
        "ratio_to_reward": round(earliest / to_reward["async"], 2),
        "reward": round(reached, 3),
        "response_length_max_over_mean": round(length_ratio(asynchronous), 1),
        "async_staleness_mean": round(mean(asynchronous, "buffer/staleness_mean"), 2),
        **{f"{name}_s": round(seconds(lines), 1) for name, lines in runs.items()},
        **{f"{name}_to_reward_s": round(value, 1) for name, value in to_reward.items()},
        **{f"{name}_wait_s": round(waiting(lines), 1) for name, lines in runs.items()},
    }


def seconds(lines: list[Line]) -> float:
    return float(lines[-1]["time_s"] - lines[0]["time_s"])


def waiting(lines: list[Line]) -> float:
    return float(sum(line["learner/wait_s"] for line in lines[1:]))


def mean(lines: list[Line], name: str) -> float:
    return float(sum(line[name] for line in lines) / len(lines))


def length_ratio(lines: list[Line]) -> float:
    longest = max(line["response_length/max"] for line in lines)
    return float(longest / mean(lines, "response_length/mean"))


def rewards(lines: list[Line]) -> list[float]:
    """Means over the last WINDOW steps."""
    values = [line["reward/mean"] for line in lines]
    return [sum(values[i : i + WINDOW]) / WINDOW for i in range(len(values) - WINDOW + 1)]


def seconds_to(lines: list[Line], reward: float) -> float:
    first = next(i for i, value in enumerate(rewards(lines)) if value >= reward)
    return float(lines[first + WINDOW - 1]["time_s"] - lines[0]["time_s"])


if __name__ == "__main__":
    main()
