"""`streamrl report`: the summary table and `report.html` of a run folder."""

import argparse
from pathlib import Path

from rich.console import Console

from streamrl.cli.display.summary import SUMMARY_METRICS, summary
from streamrl.cli.page.write import write_page
from streamrl.config import RunConfig
from streamrl.run_folder import find_run
from streamrl.tracking.jsonl import METRICS_FILE, read_metrics


def main(arguments: argparse.Namespace) -> int:
    config = find_run(arguments.folder)
    path = write_report(config)
    if arguments.html:
        print(path)
    else:
        Console().print(summary(config))
    return 0


def write_report(config: RunConfig) -> Path:
    """The run's page; returns where it is."""
    return write_page(config, read_metrics(config.run.path / METRICS_FILE, SUMMARY_METRICS))
