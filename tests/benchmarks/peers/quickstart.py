"""The quickstart's run beside TRL's GRPOTrainer: time to a reward of 0.9, by turns.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.quickstart [--steps N] [--rounds N] \
        [--algorithm grpo|own] [--python TRL/bin/python] [--set KEY=VALUE]...

Both train the model of `configs/quickstart.yaml` on the same prompts, in the same order, with the
same completions a prompt, batch, limits, reward, advantages, clip, optimizer and learning rate of
each step. TRL samples with `model.generate` and trains by turns, on all cores, each batch as one
micro-batch. StreamRL is `streamrl launch` of the file with one generator in place of two, which has
the slots of both: as many processes that compute as cores. `--algorithm own` leaves StreamRL the
algorithm of the file, its default, in place of TRL's GRPO. `--set` changes its settings.

One JSON line per run. `to_reward_s` is from the start of the command to the first step at which the
mean reward of the last 10 steps is 0.9, `to_reward_steps_s` the same from the end of the first
step; `step_s` and `step_cpu_s` are from the tenth step on, CPU of all processes. Runs take turns,
and `load` is that of the machine at the end of a run, of which about 2 are its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.prompts import open_prompts
from learners.optimizer import learning_rate
from streamrl.config import RunConfig, load_config
from tests.benchmarks.peers.environments import ROOT, environment
from tests.benchmarks.peers.usage import Usage, run

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
WORKER = Path(__file__).with_name("trl_quickstart.py")
GRPO = ("algorithm.advantage=grpo", "algorithm.loss=ppo")
REWARD, WINDOW, FIRST = 0.9, 10, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="by default those of the quickstart")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--algorithm", choices=("grpo", "own"), default="grpo")
    parser.add_argument("--python", type=Path, help="a Python that has TRL; else one is made")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    python = arguments.python or environment("trl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        algorithm = GRPO if arguments.algorithm == "grpo" else ()
        overrides = [f"model.path={folder / 'model'}", *algorithm, *arguments.overrides]
        if arguments.steps:
            overrides = [*overrides, f"run.max_steps={arguments.steps}"]
        config = load_config(QUICKSTART, overrides).config
        subprocess.run(
            [STREAMRL, "get-model", "--config", str(QUICKSTART), *as_options(overrides)], check=True
        )
        for number in range(arguments.rounds):
            for line in (trl(config, folder, python), ours(folder, overrides, number)):
                print(json.dumps({"benchmark": "quickstart", "round": number, **line}), flush=True)


def ours(folder: Path, overrides: Sequence[str], number: int) -> dict[str, Any]:
    own = {
        "run.folder": folder,
        "run.name": f"ours-{number}",
        "run.evaluate": "false",
        "generator.count": 1,
        "generator.max_num_seqs": 384,
        "buffer.url": "zmq://127.0.0.1:0",
        "weights.address": "tcp://127.0.0.1:0",
    }
    chosen = as_options([*(f"{key}={value}" for key, value in own.items()), *overrides])
    usage = run([STREAMRL, "launch", str(QUICKSTART), "--no-view", *chosen], {})
    text = (folder / f"ours-{number}" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    times, rewards = [line["time_s"] for line in lines], [line["reward/mean"] for line in lines]
    return {"system": "streamrl", **figures(usage, times, rewards)}


def as_options(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def trl(config: RunConfig, folder: Path, python: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    file.write_text(json.dumps(trl_settings(config, folder)))
    usage = run([str(python), str(WORKER), str(file)], {"PYTHONPATH": str(ROOT)})
    record = json.loads((folder / "trl.json").read_text())
    return {"system": "trl", **figures(usage, record["times"], record["rewards"])}


def trl_settings(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What the worker needs, all of it from the run's configuration."""
    steps, groups = config.run.max_steps, config.learner.groups_per_step
    prompts, optimizer = open_prompts(config.data, config.run.seed), config.learner.optimizer
    return {
        "folder": str(folder),
        "model": config.model.path,
        "seed": config.run.seed,
        "steps": steps,
        "num_threads": os.cpu_count(),
        "prompts": [[p.content, p.answer] for p in (prompts[i] for i in range(steps * groups))],
        "groups_per_step": groups,
        "group_size": config.generator.group_size,
        "max_new_tokens": config.generator.max_new_tokens,
        "rates": [learning_rate(step, optimizer, steps) for step in range(steps + 1)],
        "betas": optimizer.betas,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def figures(usage: Usage, times: Sequence[float], rewards: Sequence[float]) -> dict[str, Any]:
    """Of a run whose steps ended at these times with these mean rewards."""
    reached = reached_at(rewards)
    first, last = min(FIRST, len(times) - 1), len(times) - 1
    num_steps = max(1, last - first)
    return {
        "steps": len(times),
        "step_s": round((times[last] - times[first]) / num_steps, 4),
        "step_cpu_s": round(usage.cpu_between(times[first], times[last]) / num_steps, 4),
        "to_reward_s": None if reached is None else round(times[reached] - usage.start_s, 1),
        "to_reward_steps_s": None if reached is None else round(times[reached] - times[0], 1),
        "to_reward_steps": None if reached is None else reached + 1,
        "first_step_s": round(times[0] - usage.start_s, 1),
        "reward": round(float(np.mean(rewards[-WINDOW:])), 3),
        "peak_mib": round(usage.peak_mib),
        "load": round(os.getloadavg()[0], 1),
    }


def reached_at(rewards: Sequence[float]) -> int | None:
    """The first step, from 0, at which the mean of the last WINDOW steps is REWARD.

    >>> reached_at([0.0] * 10 + [1.0] * 20)
    18
    """
    means = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), mode="valid")
    found = np.flatnonzero(means >= REWARD - 1e-9)
    return int(found[0]) + WINDOW - 1 if len(found) else None


if __name__ == "__main__":
    main()
