"""One configuration under several values of settings, several seeds each.

    PYTHONPATH=. python -m tests.research.ablate configs/ablation/stale_bf16.yaml
        --vary algorithm.rollout_is=metrics_only,token_is --seeds 0,1,2

Every combination of what --vary and --variants vary is run, as a `streamrl launch` of its own under
`run.folder`/`run.name`, or with --lag in one process each (see `tests.research.exact_lag`);
complete runs are not repeated, so an ablation that was stopped continues when it is called again;
one that was made with other settings is refused.
Writes a table (`ablation.md`), of two axes a grid too, and `ablation.png`.
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.cli.arguments import options
from streamrl.cli.display.numbers import metric_mean
from streamrl.cli.processes.command import call, executable
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.loading.load import configuration
from streamrl.config.loading.rendering import values_of
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, StreamRLError
from streamrl.run_folder import config_of, read_evaluation, read_learner
from streamrl.tracking.jsonl import read_metrics
from tests.research.figure import drawn
from tests.research.forked import exit_code_of
from tests.research.lag import LAG_FILE, Lag
from tests.research.script import run_script
from tests.research.variants import axes, grid, name_of

# Ports are picked for each run, and a folder may be named in several ways.
_OWN = ("run.folder", "run.name", "buffer.url", "weights.address")


def require_made_like(config: RunConfig, lag: str | None) -> None:
    """
    Raises:
        ConfigError: the run in the folder of `config` had other settings, or another --lag.
    """
    folder = config.run.path
    file = folder / LAG_FILE
    made = {**values_of(config_of(folder)), "--lag": file.read_text() if file.exists() else None}
    asked = {**values_of(config), "--lag": lag}
    for name in {**asked, **made}:
        if name not in _OWN and made.get(name) != asked.get(name):
            raise ConfigError(
                f"{folder} is complete and was made with {name} {made.get(name)}, not "
                f"{asked.get(name)}: choose another run.name, or remove the folder"
            )


_WINDOW = 10
_ESS = "mismatch/rollout_is_eff_sample_size"


@dataclass(frozen=True)
class Run:
    """One value of each setting that is varied, one seed."""

    value: str
    seed: int
    config: RunConfig
    overrides: tuple[str, ...]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Its metrics, once it is complete."""
        return self._read()

    def is_complete(self, lag: str | None) -> bool:
        """
        Raises:
            ConfigError: it is, with other settings than these.
        """
        run, lines = self.config.run, self._read()
        learner = read_learner(run.path)
        if not lines or (
            lines[-1]["step"] < run.max_steps and not (learner and learner.ended_early)
        ):
            return False
        is_scored = (run.path / "evaluation.json").exists()
        if not is_scored and (run.evaluate or lag is not None):
            return False
        require_made_like(self.config, lag)
        return True

    def _read(self) -> list[dict[str, Any]]:
        return read_metrics(self.config.run.path / "metrics.jsonl")


@dataclass(frozen=True)
class Outcome:
    """The results of one value; rewards and greedy scores per seed, the rest as means over all."""

    value: str
    final_rewards: tuple[float, ...]
    greedy_rewards: tuple[float, ...]
    staleness: float
    largest_staleness: int
    ess: float
    mismatch_kl: float


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ablate", description="compare one run per value of a setting and seed"
    )
    options.config(parser)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="SECTION.KEY=A,B,...",
        help="a setting and its values; can be repeated, for every combination",
    )
    parser.add_argument(
        "--variants", metavar="FILE", help="YAML file of named sets of settings, as another axis"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated; default: 0,1,2")
    parser.add_argument(
        "--lag",
        choices=("even", "uneven"),
        help="run each in one process, with groups that are exactly buffer.max_staleness versions "
        "old, or each of them 0 to twice as many; without, each is a launch",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="of --lag, so many at once; default: 1"
    )
    return parser


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    base = configuration(arguments).config
    source = arguments.file or arguments.config
    runs = list(plan(base, source, arguments))
    _require_folders(runs)
    if arguments.lag is None and arguments.jobs != 1:
        raise ConfigError("--jobs: several runs at once are for --lag; a launch takes the machine")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs: was {arguments.jobs}; must be at least 1")
    numbered = list(enumerate(runs, 1))
    missing = [(number, run) for number, run in numbered if not run.is_complete(arguments.lag)]
    if len(missing) < len(runs):
        console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are complete, and are kept")

    if arguments.lag is not None and missing:
        make_model_of(base)

    def make(number: int, run: Run) -> None:
        console.print(f"run {number} of {len(runs)}: {run.value}, seed {run.seed}")
        if arguments.lag is None:
            code = _launch(run, source)
        else:
            code = exit_code_of(Lag(arguments.lag), source, run.overrides)
        if code != 0:
            raise StreamRLError(f"the run {run.config.run.path} ended with exit code {code}")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(make, number, run) for number, run in missing]
        try:
            for future in as_completed(futures):
                future.result()
        except KeyboardInterrupt:
            console.print("stopped; the same command makes the runs that are missing")
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    values = list(dict.fromkeys(run.value for run in runs))
    outcomes = [outcome(value, [run for run in runs if run.value == value]) for value in values]
    varied = axes(arguments.vary, arguments.variants)
    lines = list(markdown(name_of(*(axis.name for axis in varied)), outcomes))
    if len(varied) == 2:
        lines += ["", *grid(varied, {o.value: o.final_rewards for o in outcomes})]
    table = "\n".join(lines) + "\n"
    folder = base.run.path
    (folder / "ablation.md").write_text(table)
    _draw(values, runs, folder / "ablation.png")
    console.print(table, soft_wrap=True)
    return 0


def plan(base: RunConfig, source: str, arguments: argparse.Namespace) -> Iterator[Run]:
    """Every run, its configuration checked before the first one starts."""
    try:
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {arguments.seeds}: must look like 0,1,2") from error
    varied = [axis.variants for axis in axes(arguments.vary, arguments.variants)]
    for seed in seeds:
        for variants in itertools.product(*varied):
            value = name_of(*(variant.name for variant in variants))
            overrides = (
                *arguments.overrides,
                *(override for variant in variants for override in variant.overrides),
                f"run.seed={seed}",
                f"run.folder={base.run.path}",
                f"run.name={_in_a_name(value)}-seed{seed}",
            )
            yield Run(value, seed, load_config(source, overrides).config, overrides)


def _require_folders(runs: Sequence[Run]) -> None:
    """
    Raises:
        ConfigError: two runs would be in one folder.
    """
    by_path = {run.config.run.path: run for run in reversed(runs)}
    for run in runs:
        if (first := by_path[run.config.run.path]) is not run:
            names = [f"{one.value}, seed {one.seed}" for one in (first, run)]
            raise ConfigError(
                f"{' and '.join(names)} would be in one folder, {run.config.run.path}: leave one "
                "out, or name them in a file of --variants"
            )


def _in_a_name(value: str) -> str:
    """The value as part of a run's name; that of a user's own code has a path in it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).lstrip("._-")


def outcome(value: str, runs: Sequence[Run]) -> Outcome:
    """The runs of one value, summed up; the final reward is the mean of the last tenth of steps."""
    lines = [line for run in runs for line in run.lines]
    evaluations = [read_evaluation(run.config.run.path) for run in runs]
    return Outcome(
        value=value,
        final_rewards=tuple(_final_reward(run.lines) for run in runs),
        greedy_rewards=tuple(e["greedy_reward_mean"] for e in evaluations if e),
        staleness=_mean(lines, "buffer/staleness_mean"),
        largest_staleness=max(line["buffer/staleness_max"] for line in lines),
        ess=_mean(lines, _ESS),
        mismatch_kl=_mean(lines, "mismatch/mismatch_k3_kl"),
    )


def markdown(setting: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table."""
    yield (
        f"| `{setting}` | final reward (seeds) | greedy, held out (seeds) | "
        "staleness mean / max | ESS | k3 KL |"
    )
    yield "|---|---|---|---|---|---|"
    for row in outcomes:
        yield (
            f"| {row.value} | {_spread(row.final_rewards)} | {_spread(row.greedy_rewards)} | "
            f"{row.staleness:.1f} / {row.largest_staleness} | {row.ess:.2f} | "
            f"{row.mismatch_kl:.2g} |"
        )


def make_model_of(config: RunConfig) -> None:
    """Once, for the runs that go beside each other."""
    if config.model.recipe is not None and not Path(config.model.path).exists():
        config.run.path.mkdir(parents=True, exist_ok=True)
        file = config.run.path / "config.yaml"
        write_file(file, to_yaml(config))
        call("get-model", "--config", str(file))


def _launch(run: Run, source: str) -> int:
    """The exit code of the run, after its end."""
    command = [executable(), "launch", source, "--no-view", "--new"]
    command += [word for override in run.overrides for word in ("--set", override)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        print(completed.stderr.strip(), file=sys.stderr)
    return completed.returncode


def _final_reward(lines: Sequence[dict[str, Any]]) -> float:
    return _mean(lines[-max(1, len(lines) // 10) :], "reward/mean")


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    value = metric_mean(lines, name)
    return float("nan") if value is None else value


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "not measured"
    each = ", ".join(f"{value:.3f}" for value in values)
    return f"{statistics.fmean(values):.3f} ({each})"


def _draw(values: Sequence[str], runs: Sequence[Run], path: Path) -> None:
    panels = (("Reward of sampled rollouts", "reward/mean"), ("Effective sample size", _ESS))
    with drawn(path, 1, 2, (11, 4)) as (_, axes):
        for axis, (title, name) in zip(axes, panels, strict=True):
            for run in runs:
                label = run.value if run.seed == runs[0].seed else None
                color = f"C{values.index(run.value)}"
                axis.plot(_smooth(run.lines, name), color=color, label=label, linewidth=1)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylim(0, 1.02)
        axes[0].legend(fontsize=8)


def _smooth(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [
        _mean(lines[max(0, end - _WINDOW) : end], name) for end in range(_WINDOW, len(lines) + 1)
    ]


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
