"""`streamrl report`: the summary table, `report.png` and `report.html` of a run folder."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.cli.display.figure import drawn
from streamrl.cli.display.summary import SUMMARY_METRICS, summary
from streamrl.cli.page.write import write_page
from streamrl.config import RunConfig
from streamrl.run_folder import find_run
from streamrl.tracking.jsonl import METRICS_FILE, read_metrics

# title, (metric, label)s
_PANELS = (
    ("Training reward of each step", (("reward/mean", "mean"),)),
    (
        "Staleness in versions",
        (("buffer/staleness_mean", "mean"), ("buffer/staleness_max", "largest")),
    ),
    ("Effective sample size", (("mismatch/rollout_is_eff_sample_size", "fraction"),)),
    (
        "Throughput in tokens/s",
        (("generator/tokens_per_s", "generated"), ("learner/tokens_per_s", "trained")),
    ),
    (
        "Response length in tokens, mean",
        (
            ("fairness/sampled_length_mean", "sampled"),
            ("fairness/trained_length_mean", "trained"),
            ("fairness/dropped_length_mean", "dropped"),
        ),
    ),
    (
        "Response length in tokens, 99th percentile",
        (
            ("fairness/sampled_length_p99", "sampled"),
            ("fairness/trained_length_p99", "trained"),
            ("fairness/dropped_length_p99", "dropped"),
        ),
    ),
)


def main(arguments: argparse.Namespace) -> int:
    config = find_run(arguments.folder)
    if arguments.html:
        print(write_page(config, read_metrics(config.run.path / METRICS_FILE, SUMMARY_METRICS)))
        return 0
    write_report(config)
    Console().print(summary(config))
    return 0


def write_report(config: RunConfig) -> list[dict[str, Any]]:
    """Draw `report.png` from `metrics.jsonl`, and write the run's page; the lines of the former."""
    folder = config.run.path
    names = {name for _, series in _PANELS for name, _ in series}
    lines = read_metrics(folder / METRICS_FILE, SUMMARY_METRICS | names)
    if lines:
        _draw(lines, folder)
    write_page(config, lines)
    return lines


def _draw(lines: Sequence[Mapping[str, Any]], folder: Path) -> None:
    with drawn(folder / "report.png", 3, 2, (10, 9)) as (figure, axes):
        for axis, (title, series) in zip(axes, _PANELS, strict=True):
            for name, label in series:
                points = [(x["step"], x[name]) for x in lines if x.get(name) is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
            axis.set_title(title, fontsize=10)
            if axis.dataLim.y0 >= 0:
                axis.set_ylim(bottom=0)
            if len(axis.lines) > 1:
                axis.legend(fontsize=8)
        for axis in axes[4:]:
            axis.set_xlabel("step")
        figure.suptitle(folder.name)
