"""TRL's GRPOTrainer beside bench_async: the same model, prompts, lengths, reward and optimizer.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.workload [--python TRL/bin/python] \
        [--steps N] [--workloads A,B] [--seeds 0,1,2] [--checkpoints N] [--micro-batches 1,4] \
        [--folder FOLDER]

TRL samples with `model.generate` and trains by turns, on all cores; of the numbers of micro-batches
the fastest counts. With vLLM it would need a GPU or a server beside it. The model is the one of
bench_async in the same folder, or made as there. Prints one JSON line per run, in the form of
bench_async, so that one table shows both; `lengths_by_step` are means.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.prompts import open_prompts
from streamrl.config import RunConfig, load_config
from tests.benchmarks.async_runs.held_out import curve
from tests.benchmarks.async_runs.lengths import mean, p99
from tests.benchmarks.async_runs.records import Line
from tests.benchmarks.async_runs.run import Plan, make_model, write_configuration
from tests.benchmarks.async_runs.settings import SCALES_ADVANTAGES, WORKLOADS, modes
from tests.benchmarks.peers.environments import ROOT, environment

WORKER = Path(__file__).with_name("trl_workload.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="a Python that has TRL; else one is made")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--micro-batches", default="1")
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    python = arguments.python or environment("trl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for workload in arguments.workloads.split(","):
            for seed in map(int, arguments.seeds.split(",")):
                plan = Plan(
                    folder, WORKLOADS[workload], seed, arguments.steps, arguments.checkpoints
                )
                cuts = map(int, arguments.micro_batches.split(","))
                runs = [run(plan, python, cut) for cut in cuts]
                print(json.dumps(min(runs, key=lambda line: line["seconds"])), flush=True)


def run(plan: Plan, python: Path, micro_batches: int) -> Line:
    """One training in TRL's own environment, scored by the held-out evaluation of bench_async."""
    path = write_configuration(plan, next(modes((), ())))
    config = load_config(path).config
    make_model(config, path)
    output = plan.folder / f"{plan.workload.name}-trl-{micro_batches}-{plan.seed}"
    output.mkdir(exist_ok=True)
    file = output / "settings.json"
    file.write_text(json.dumps(settings(config, plan, output, micro_batches)))
    command = [str(python), str(WORKER), str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    record = json.loads((output / "trl.json").read_text())
    times = dict(enumerate(record["times"], 1))
    return {
        "benchmark": "async",
        "workload": plan.workload.name,
        "seed": plan.seed,
        "mode": "trl",
        "steps": len(record["times"]),
        "micro_batches": micro_batches,
        **figures(config, record),
        "curve": curve(config, plan.workload, {0: config.model.path, **saved(output)}, times),
    }


def saved(output: Path) -> dict[int, Path]:
    """The checkpoints, by step."""
    folders = {int(path.name.rpartition("-")[2]): path for path in output.glob("checkpoint-*")}
    return dict(sorted(folders.items()))


def settings(config: RunConfig, plan: Plan, output: Path, micro_batches: int) -> dict[str, Any]:
    """What the worker needs, from the configuration of the synchronous run."""
    return {
        "seed": config.run.seed,
        "source_kwargs": config.data.source_kwargs,
        "steps": plan.steps,
        "groups_per_step": config.learner.groups_per_step,
        "group_size": config.generator.group_size,
        "max_new_tokens": config.generator.max_new_tokens,
        "scale_rewards": SCALES_ADVANTAGES,
        "lr": config.learner.optimizer.lr,
        "warmup_steps": config.learner.optimizer.warmup_steps,
        "num_threads": config.learner.num_threads,
        "micro_batches": micro_batches,
        "save_every": config.learner.checkpoint.every,
        "model": config.model.path,
        "folder": str(output),
    }


def figures(config: RunConfig, record: dict[str, Any]) -> Line:
    """Under the names of bench_async.

    Raises:
        ValueError: it did not train the same prompts, `group_size` times each.
    """
    indices = [prompt_index for prompt_index, _ in record["completed"]]
    lengths = [length for _, length in record["completed"]]
    num_groups = len(record["times"]) * config.learner.groups_per_step
    size = config.generator.group_size
    if sorted(indices) != [i for i in range(num_groups) for _ in range(size)]:
        raise ValueError(f"TRL trained other prompts than 0 to {num_groups - 1}, {size} times each")
    prompts = open_prompts(config.data, config.run.seed)
    return {
        "seconds": round(record["times"][-1] - record["times"][0], 2),
        "groups_trained": num_groups,
        "trained_answer_length_mean": mean([len(prompts[i].answer) for i in range(num_groups)]),
        "trained_tokens": sum(lengths),
        "trained_response_length_mean": mean(lengths),
        "trained_response_length_p99": p99(lengths),
        "lengths_by_step": by_step(lengths, len(record["times"])),
    }


def by_step(lengths: Sequence[int], steps: int) -> list[float | None]:
    """Mean response length of each step.

    >>> by_step([1, 2, 3, 4], 2)
    [1.5, 3.5]
    """
    size = len(lengths) // steps
    return [mean(lengths[i * size : (i + 1) * size]) for i in range(steps)]


if __name__ == "__main__":
    main()
