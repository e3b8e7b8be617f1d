"""`streamrl replay`: trains the recorded steps of a run again, without generators.

    streamrl replay RUN                    by its own settings: its checkpoints must come out
    streamrl replay RUN --set NAME=VALUE   other settings beside them, compared step by step

Writes replay.json into --out (RUN/replay), and prints a table.

    0  done      1  by its own settings, the weights are not those of a checkpoint, on a CPU
"""

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from learners.replay import Replay, ReplayReport
from streamrl.errors import StreamRLError
from streamrl.run_folder import find_run

REPORT_FILE = "replay.json"


def main(arguments: argparse.Namespace) -> int:
    run, console = find_run(arguments.folder).run.path, Console(soft_wrap=True)
    disable_progress_bar()
    replay = Replay(run, arguments.overrides, arguments.start, arguments.steps)
    for step in replay.steps():
        console.print(
            f"step {step.step} of {replay.last_step}: loss {step.recorded.metrics['loss']:.4g}"
            + ("" if step.cosine is None else f", cosine {step.cosine:.3f}"),
            highlight=False,
        )
    report = replay.report()
    folder = Path(arguments.out or run / "replay")
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / REPORT_FILE).write_bytes(text + b"\n")
    console.print(_table(report))
    console.print(f"{folder / REPORT_FILE}: every step", highlight=False)
    if replay.change is not None:
        other, difference = replay.change
        console.print(
            f"ends before step {other}, which the run made with {difference}: "
            f"--from {other - 1} replays that, if there is a checkpoint",
            highlight=False,
            markup=False,
        )
    _judge(report, console)
    return 0


def _judge(report: ReplayReport, console: Console) -> None:
    if not report.checkpoints:
        console.print("the run has no checkpoint of these steps to compare with")
        return
    versions = ", ".join(str(c.policy_version) for c in report.checkpoints)
    worst = max(report.checkpoints, key=lambda c: c.largest_difference)
    if not worst.largest_difference:
        console.print(f"the same weights, bit for bit, as the checkpoints at version {versions}")
    elif report.is_exact:
        raise StreamRLError(
            f"the replay of version {worst.policy_version} is not {worst.path}: the largest "
            f"difference is {worst.largest_difference:.3g}; the release, the machine, model.path "
            "or the number of threads is another than the run's"
        )
    else:
        console.print(
            f"the weights of the checkpoints at version {versions} but for "
            f"{worst.largest_difference:.3g}: on a GPU, and where the run had several ranks, sums "
            "have another order"
        )


def _table(report: ReplayReport) -> Table:
    """Means over the steps, for each policy."""
    table = Table(title=f"{len(report.steps)} steps after version {report.policy_version}")
    is_compared = any(step.changed is not None for step in report.steps)
    changed = ", ".join(report.settings)
    for column in ("mean over the steps", "as recorded", *([changed] if is_compared else [])):
        table.add_column(column)
    policies = [[step.recorded for step in report.steps]]
    if is_compared:
        policies.append([step.changed for step in report.steps if step.changed is not None])
    names = dict.fromkeys(name for steps in policies for step in steps for name in step.metrics)
    for name in names:
        values = [[s.metrics[name] for s in steps if name in s.metrics] for steps in policies]
        table.add_row(name, *map(_mean, values))
    table.add_row("estimated reward", *(_mean([s.estimated_reward for s in p]) for p in policies))
    table.add_row("its effective samples", *(_mean([s.estimate_ess for s in p]) for p in policies))
    cosines = [step.cosine for step in report.steps if step.cosine is not None]
    if cosines:
        table.add_row("cosine of the updates", "1", _mean(cosines))
    return table


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "-"
