"""`streamrl watch`: the progress of a run folder in lines, also of one that other machines write.

0  the run has made its last step, or was stopped      130  Ctrl-C
"""

import argparse
import time

from rich.console import Console

from streamrl.cli.buffer.target import read_folder
from streamrl.cli.display.view import REFRESH_S, LinePrinter
from streamrl.config import RunConfig
from streamrl.diagnosis.outcome import RunState, outcome, state_of
from streamrl.run_folder import find_run


def main(arguments: argparse.Namespace) -> int:
    """Waits for new lines in metrics.jsonl; ends when the learner has ended, or at Ctrl-C."""
    config = find_run(arguments.folder)
    console = Console(highlight=False)
    printer = LinePrinter(config, console)
    while not _has_ended(config):
        printer.print_if_due()
        time.sleep(REFRESH_S)
    printer.print_now()
    console.print(outcome(read_folder(config)))
    return 0


def _has_ended(config: RunConfig) -> bool:
    """Whether the learner of the newest launch says so: one that only fell silent may be started
    again."""
    reading = read_folder(config)
    is_finished = state_of(reading) is RunState.FINISHED
    return reading.is_over and (is_finished or not reading.is_relaunched)
