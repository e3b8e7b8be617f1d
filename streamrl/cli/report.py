"""The summary table and `report.html` of a run folder: at the end of a launch, however it ends, and
by `streamrl report` at any time.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from streamrl.cli.display.summary import SUMMARY_METRICS, summary
from streamrl.cli.launchers import options_of
from streamrl.cli.page.write import write_page
from streamrl.config import RunConfig
from streamrl.error_record import ErrorRecord
from streamrl.run_folder import Launch, find_run, note_launch
from streamrl.tracking.jsonl import METRICS_FILE, read_metrics


def main(arguments: argparse.Namespace) -> int:
    config = find_run(arguments.folder)
    path = write_report(config)
    if arguments.html:
        print(path)
    else:
        Console().print(summary(config))
    return 0


@contextmanager
def reported(config: RunConfig, arguments: argparse.Namespace, console: Console) -> Iterator[None]:
    """Around a launch: `launch.json` says that it has begun, and how it has ended, for `streamrl
    status`; page and summary follow."""
    folder, options = config.run.path, options_of(arguments)
    note_launch(folder, Launch(options))
    try:
        yield
    except BaseException as error:
        # Ctrl-C is none.
        failure = ErrorRecord.of(error).sentence if isinstance(error, Exception) else ""
        note_launch(folder, Launch(options, time.time(), failure))
        # As a full disk would; the error that ended the launch is the one to be told.
        with suppress(OSError):
            _summarize(config, console)
        raise
    note_launch(folder, Launch(options, time.time()))
    _summarize(config, console)


def _summarize(config: RunConfig, console: Console) -> None:
    write_report(config)
    console.print(summary(config))


def write_report(config: RunConfig) -> Path:
    """The run's page; returns where it is."""
    return write_page(config, read_metrics(config.run.path / METRICS_FILE, SUMMARY_METRICS))
