"""`streamrl watch`: the live view of a run folder, also of one that other machines write."""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from streamrl.cli.display.view import REFRESH_S, render
from streamrl.run_folder import config_of
from streamrl.tracking.jsonl import read_metrics


def main(arguments: argparse.Namespace) -> int:
    """Waits for new lines in metrics.jsonl; ends with the last step or at Ctrl-C."""
    folder = Path(arguments.folder)
    config = config_of(folder)
    console = Console()
    lines = read_metrics(folder / "metrics.jsonl")
    with Live(render(config, lines, _roles(lines)), console=console) as screen:
        while not lines or lines[-1]["step"] < config.run.max_steps:
            time.sleep(REFRESH_S)
            lines = read_metrics(folder / "metrics.jsonl")
            screen.update(render(config, lines, _roles(lines)))
    return 0


def _roles(lines: list[dict[str, object]]) -> dict[str, str]:
    last = lines[-1] if lines else {}
    names = [n.split("/")[1] for n in last if n.startswith("generator/") and n.endswith("version")]
    return {"buffer": "", "learner": "", **dict.fromkeys(sorted(names), "")}
