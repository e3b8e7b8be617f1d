"""Steps and tokens to a reward, of a policy that a teacher trains beside one that rewards train.

    PYTHONPATH=. python -m tests.research.distill configs/ablation/lag.yaml \\
        --lags 0,1,8 --seeds 0,1,2 --jobs 2

The teacher is the first model after GRPO without lag: a launch of the same configuration, made once
and exported to `--teacher`. Then every variant of `--variants` begins from the first model, on the
same prompts, at each lag, in one process (see `tests.research.exact_lag`). Complete runs are not
repeated. A table says after how many steps, and after how many trained tokens, the mean reward of
WINDOW steps was at least `--reach`; `never` where it was not.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.cli.processes.command import call
from streamrl.config import load_config
from tests.research import ablate
from tests.research.script import run_script

WINDOW = 5
TEACHER = "runs/models/teacher"
VARIANTS = "configs/ablation/distillation.variants.yaml"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distill", description="steps to a reward, by a teacher and by rewards"
    )
    parser.add_argument("config", help="configuration file, such as configs/ablation/lag.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--variants", default=VARIANTS, help=f"default: {VARIANTS}")
    parser.add_argument("--teacher", default=TEACHER, help=f"default: {TEACHER}")
    parser.add_argument("--teacher-steps", type=int, metavar="N", help="default: run.max_steps")
    parser.add_argument("--lags", default="0,1,8", help="in versions; default: 0,1,8")
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")
    parser.add_argument("--jobs", default="1", help="runs at once; default: 1")
    parser.add_argument("--reach", type=float, default=0.9, help="a mean reward; default: 0.9")
    return parser


def main(arguments: argparse.Namespace) -> int:
    make_teacher(arguments)
    settings = [word for override in arguments.set for word in ("--set", override)]
    varied = ["--variants", arguments.variants, "--vary", f"buffer.max_staleness={arguments.lags}"]
    command = [arguments.config, *settings, *varied, "--seeds", arguments.seeds]
    parsed = ablate.make_parser().parse_args([*command, "--lag", "even", "--jobs", arguments.jobs])
    if code := ablate.main(parsed):
        return code
    base = load_config(arguments.config, arguments.set).config
    runs = list(ablate.plan(base, arguments.config, parsed))
    table = "\n".join(markdown(runs, arguments.reach)) + "\n"
    (base.run.path / "distillation.md").write_text(table)
    Console().print(table, soft_wrap=True)
    return 0


def make_teacher(arguments: argparse.Namespace) -> None:
    """Once: what GRPO makes of the first model, without lag."""
    if Path(arguments.teacher).exists():
        return
    own = ["run.name=teacher", "buffer.max_staleness=0", "algorithm.rollout_is=token_is"]
    own += ["run.evaluate=false"]
    if arguments.teacher_steps:
        own += [f"run.max_steps={arguments.teacher_steps}"]
    overrides = [*arguments.set, *own]
    words = [word for override in overrides for word in ("--set", override)]
    call("launch", arguments.config, "--no-view", "--new", *words)
    run = load_config(arguments.config, overrides).config.run.path
    call("export", str(run), "--output", arguments.teacher)


def first_at(lines: Sequence[dict[str, Any]], reach: float) -> tuple[int, int] | None:
    """The step, and the tokens trained until then; None if it is not reached."""
    tokens = list(accumulate(int(line["learner/num_tokens"]) for line in lines))
    for end in range(WINDOW, len(lines) + 1):
        if statistics.fmean(line["reward/mean"] for line in lines[end - WINDOW : end]) >= reach:
            return int(lines[end - 1]["step"]), tokens[end - 1]
    return None


def markdown(runs: Sequence[ablate.Run], reach: float) -> Iterator[str]:
    """The lines of the table, a row for each variant and lag."""
    yield f"| variant, lag | steps to {reach:g} (seeds) | thousand tokens | last {WINDOW} steps |"
    yield "|---|---|---|---|"
    for value in dict.fromkeys(run.value for run in runs):
        own = [run for run in runs if run.value == value]
        found = [first_at(run.lines, reach) for run in own]
        last = [
            statistics.fmean(line["reward/mean"] for line in run.lines[-WINDOW:]) for run in own
        ]
        steps = ", ".join("never" if one is None else str(one[0]) for one in found)
        tokens = ", ".join("never" if one is None else f"{one[1] / 1000:.0f}" for one in found)
        yield f"| {value} | {steps} | {tokens} | {', '.join(f'{r:.3f}' for r in last)} |"


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
