"""The picture of a recipe's page: `recipe_curves.py OUTPUT RUN...`, one run for each seed."""

import sys
from pathlib import Path

from streamrl.tracking.jsonl import METRICS_FILE, read_metrics
from tests.research.figure import drawn

_PANELS = (("Exact answers", "reward/exact"), ("Tokens of a response", "response_length/mean"))


def main(output: str, *runs: str) -> None:
    with drawn(Path(output), 1, len(_PANELS), (8, 2.6)) as (_, axes):
        for axis, (title, metric) in zip(axes, _PANELS, strict=True):
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            for run in runs:
                lines = read_metrics(Path(run, METRICS_FILE))
                steps = [line["step"] for line in lines]
                axis.plot(steps, [line[metric] for line in lines], label=Path(run).name)
            axis.set_ylim(bottom=0)
        if len(runs) > 1:
            axes[0].legend(fontsize=8)


if __name__ == "__main__":
    main(*sys.argv[1:])
