"""`streamrl evaluate`: the greedy score of a checkpoint on held-out prompts.

Prints one JSON line, after a progress bar on a terminal. If the checkpoint belongs to the run, the
line is also written to `evaluation.json` in the run's folder, if that exists.
"""

import argparse
import asyncio
import json
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from actors.evaluation import evaluate, named_model, newest_model
from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.run_folder import EVALUATION_FILE, require_run

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("prompts"),
    TimeRemainingColumn(),
)


def main(arguments: argparse.Namespace) -> int:
    disable_progress_bar()
    config: RunConfig = arguments.run_config
    model = _model(config, arguments.checkpoint)
    console = Console(stderr=True)
    with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task("evaluating", total=None)
        show = partial(p.update, task)
        scores = evaluate(config, model, lambda done, total: show(completed=done, total=total))
        line = json.dumps(asyncio.run(scores))
    print(line)
    is_within = model.resolve().is_relative_to(config.run.path.resolve())
    if config.run.path.is_dir() and (arguments.checkpoint is None or is_within):
        write_file(config.run.path / EVALUATION_FILE, line + "\n")
    return 0


def _model(config: RunConfig, given: str | None) -> Path:
    """The given checkpoint, which may be the name of a public model; else the run's newest."""
    if given is None:
        require_run(config)
        return newest_model(config)
    may_be_public = config.model.recipe is None and given.count("/") == 1
    if not (Path(given).is_dir() or may_be_public):
        raise ConfigError(f"--checkpoint: there is no folder {given}")
    return named_model(Path(given))
