"""Fixed and steered bounds on staleness at equal time, where generators slow down in the middle.

    PYTHONPATH=. python -m tests.research.steer configs/ablation/lag.yaml --seeds 0,1,2

Each run is one process with a simulated clock: the ledger, the steering and the training of a tiny
model are the real ones, and the time that a group and a step take is said by the options, in steps
of the learner. So what a run trains with which lag, and when, is the same on any machine. A group
is sampled whole by the version that its generator had when it began; generators have `--slots`
places for groups, and take `--latency` for each, log-normal with a sigma of `--spread`, and
`--slowdown` times that from the middle of the run on. A run ends at `--time`.

Prints a line for each bound: its steps, staleness, effective sample size, the reward of the last
tenth of the time, and the held-out greedy reward of the last policy. Complete runs are kept.
"""

import argparse
import asyncio
import heapq
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from transformers.utils.logging import disable_progress_bar

from buffers.ledger.ledger import Ledger
from learners.batch.training_batch import TrainingBatch
from learners.steering import EFF_SAMPLE_SIZE, Steering
from streamrl.cli.arguments import options
from streamrl.config import RunConfig, load_config
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.metrics import staleness_metrics
from streamrl.types import GroupHeader, Lease, TrajectoryGroup
from tests.research.ablate import make_model_of
from tests.research.exact_lag import LaggedRun
from tests.research.lag import Lag
from tests.research.script import run_script

RESULT = "steer.json"
STEERED = "{min: 1, max: 8}"


@dataclass(frozen=True)
class Speeds:
    """In steps of the learner, but for the slots; see the module."""

    time: float
    latency: float
    spread: float
    slots: int
    slowdown: float


class Fleet:
    """Generators and a ledger on a simulated clock, for a learner whose step takes one."""

    def __init__(self, config: RunConfig, speeds: Speeds, rng: np.random.Generator) -> None:
        buffer = config.buffer
        self.ledger = Ledger(
            groups_per_step=config.learner.groups_per_step,
            max_staleness=buffer.largest_staleness,
            min_staleness=buffer.smallest_staleness,
        )
        self.now = 0.0
        self._num_groups = config.learner.groups_per_step
        self._speeds = speeds
        self._rng = rng
        self._term = self.ledger.attach(0)
        self._running: list[tuple[float, int, int, Lease]] = []
        self._num_leases = 0

    def take(self) -> tuple[float, tuple[GroupHeader, ...]]:
        """How long the learner waits for its next batch, and the batch."""
        since = self.now
        while not (taken := self._try_take()):
            self._finish_next()
        return self.now - since, taken

    def train(self) -> None:
        """A step passes."""
        until = self.now + 1.0
        self._lease()
        while self._running and self._running[0][0] <= until:
            self._finish_next()
        self.now = until

    def advance(self, steered_bound: int) -> None:
        version = self.ledger.version + 1
        self.ledger.advance(version, self._term, steered_bound)
        self.ledger.acknowledge(version, self._term)

    def _try_take(self) -> tuple[GroupHeader, ...]:
        self._lease()
        return self.ledger.take(self._num_groups, self.ledger.version, self._term)

    def _lease(self) -> None:
        while len(self._running) < self._speeds.slots:
            number = self._num_leases
            lease = self.ledger.lease(f"fleet/{number}", 0.0, 1.0)
            if lease is None:
                return
            self._num_leases += 1
            spread, slow = self._speeds.spread, self._speeds.slowdown
            # The mean of the log-normal distribution is 1.
            seconds = self._speeds.latency * self._rng.lognormal(-(spread**2) / 2, spread)
            seconds *= slow if self.now >= self._speeds.time / 2 else 1.0
            entry = (self.now + seconds, number, self.ledger.version, lease)
            heapq.heappush(self._running, entry)

    def _finish_next(self) -> None:
        self.now, _, version, lease = heapq.heappop(self._running)
        header = GroupHeader(
            group_id=lease.lease_id,
            prompt_index=lease.prompt_index,
            environment="",
            oldest_version=version,
            newest_version=version,
            lengths=(1,),
            response_lengths=(1,),
            rewards=(0.0,),
        )
        self.ledger.put(lease.lease_id, header, 0.0)
        self._lease()


class SteeredRun(LaggedRun):
    """Made in the event loop that runs it."""

    def __init__(self, config: RunConfig, speeds: Speeds) -> None:
        super().__init__(config, Lag.EVEN)
        self._fleet = Fleet(config, speeds, np.random.default_rng(config.run.seed))
        self._speeds = speeds

    async def run(self) -> None:
        """Until the time is over; writes what each step was, and the score of the last policy."""
        fleet, bound = self._fleet, self._config.buffer.smallest_staleness
        steering = Steering.start(self._config.buffer.max_staleness, bound)
        lines: list[dict[str, Any]] = []
        while fleet.now < self._speeds.time:
            version = fleet.ledger.version
            self._remember(version)
            wait, headers = fleet.take()
            groups = await self._sample([(h.oldest_version, h.prompt_index) for h in headers])
            fleet.train()
            metrics = self._step(groups, version)
            line: dict[str, Any] = {"time": fleet.now, "wait": wait, "bound": bound}
            line |= _kept(metrics)
            if steering is not None:
                ess = metrics[EFF_SAMPLE_SIZE]
                steering, line["steered"] = steering.after(ess, wait / (wait + 1.0))
                bound = steering.bound
            fleet.advance(bound)
            lines.append({**line, **staleness_metrics(headers, version)})
        self._remember(fleet.ledger.version)
        score = await self._score(fleet.ledger.version)
        await self._engine.close()
        found = {"lines": lines, "greedy": score["greedy_reward_mean"], "speeds": self._speeds}
        self._config.run.path.mkdir(parents=True, exist_ok=True)
        write_file(self._config.run.path / RESULT, msgspec.json.encode(found).decode())

    def _step(self, groups: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
        self._trainer.accumulate(TrainingBatch.of(groups, version))
        return dict(self._trainer.update())


def _kept(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("reward/mean", EFF_SAMPLE_SIZE)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="steer", description="fixed and steered bounds at equal, simulated time"
    )
    options.config(parser)
    parser.add_argument(
        "--bounds",
        default=f"[1, 2, 4, 8, '{STEERED}']",
        help="YAML list of values of buffer.max_staleness; default: %(default)s",
    )
    parser.add_argument("--seeds", default="0", help="comma-separated; default: %(default)s")
    number = partial(parser.add_argument, type=float, metavar="STEPS")
    number("--time", default=150.0, help="of a run; default: %(default)g")
    number("--latency", default=2.0, help="of a group, in the mean; default: %(default)g")
    parser.add_argument("--spread", type=float, default=0.3, help="default: %(default)g")
    parser.add_argument("--slots", type=int, default=160, help="default: %(default)d")
    parser.add_argument("--slowdown", type=float, default=2.0, help="default: %(default)g")
    return parser


def main(arguments: argparse.Namespace) -> int:
    disable_progress_bar()
    source = arguments.file or arguments.config
    if source is None:
        raise ConfigError("give a configuration file")
    speeds = Speeds(
        *(arguments.time, arguments.latency, arguments.spread),
        *(arguments.slots, arguments.slowdown),
    )
    make_model_of(load_config(source, arguments.overrides).config)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    print("| bound | steps | staleness | ESS | last tenth | greedy, held out |")
    print("|---|---|---|---|---|---|")
    for bound in map(str, yaml.safe_load(arguments.bounds)):
        results = [_result(source, arguments.overrides, bound, seed, speeds) for seed in seeds]
        print(_row(bound, results, speeds), flush=True)
        changes = [line["steered"] for line in results[0]["lines"] if line.get("steered")]
        print("".join(f"  {change}\n" for change in changes), end="", file=sys.stderr)
    return 0


def _result(
    source: str, overrides: Sequence[str], bound: str, seed: int, speeds: Speeds
) -> dict[str, Any]:
    """Of the run, which is made unless it is complete."""
    base = load_config(source, overrides).config.run
    name = "".join(c if c.isalnum() else "-" for c in bound).strip("-")
    own = (f"buffer.max_staleness={bound}", f"run.seed={seed}")
    place = (f"run.folder={base.path}", f"run.name=steer-{name}-seed{seed}")
    config = load_config(source, [*overrides, *own, *place]).config
    file: Path = config.run.path / RESULT
    if not file.exists():

        async def run() -> None:
            await SteeredRun(config, speeds).run()

        asyncio.run(run())
    found: dict[str, Any] = json.loads(file.read_text())
    if Speeds(**found["speeds"]) != speeds:
        raise ConfigError(f"{file} was made with {found['speeds']}: choose another run.name")
    return found


def _row(bound: str, results: Sequence[dict[str, Any]], speeds: Speeds) -> str:
    lines = [line for result in results for line in result["lines"]]
    last = [
        statistics.fmean(
            line["reward/mean"] for line in result["lines"] if line["time"] > 0.9 * speeds.time
        )
        for result in results
    ]
    steps = statistics.fmean(len(result["lines"]) for result in results)
    staleness = statistics.fmean(line["buffer/staleness_mean"] for line in lines)
    ess = statistics.fmean(line[EFF_SAMPLE_SIZE] for line in lines)
    greedy = [result["greedy"] for result in results]
    return (
        f"| {bound} | {steps:.0f} | {staleness:.1f} | {ess:.3f} | {_spread(last)} | "
        f"{_spread(greedy)} |"
    )


def _spread(values: Sequence[float]) -> str:
    each = ", ".join(f"{value:.3f}" for value in values)
    return f"{statistics.fmean(values):.3f} ({each})" if len(values) > 1 else each


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
