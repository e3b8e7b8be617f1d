"""`streamrl launch`: everything a run needs on this machine, as separate processes.

check; make the model if it has a recipe; compare engine and learner if `parity` sets a threshold;
run buffer, learner and generators until the learner ends or a signal comes; evaluate; report
"""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from rich.console import Console

from streamrl.checkpoints.steps_left import require_steps_to_launch
from streamrl.cli.display.summary import summary
from streamrl.cli.display.view import ProgressView
from streamrl.cli.parity.compare import require_parity
from streamrl.cli.preflight.child import require_startable
from streamrl.cli.processes.command import call
from streamrl.cli.processes.daemons import BackgroundTask, run_daemons
from streamrl.cli.report import write_report
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.config.loading.similar import RESOLVED_FILE
from streamrl.errors import Interrupted, StreamRLError
from streamrl.run_folder import prepare


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    require_startable(arguments)
    config = configuration(arguments).config
    require_steps_to_launch(config, resume=arguments.resume, new=arguments.new)
    config = prepare(config, resume=arguments.resume, new=arguments.new)
    remedy = f"streamrl launch {_config_file(config)} --resume"
    try:
        run_here(
            config, console, resume=arguments.resume, new=arguments.new, live=not arguments.no_view
        )
        remedy = f"streamrl evaluate {_config_file(config)}"
        if config.run.evaluate:
            _evaluate(config)
    except KeyboardInterrupt:
        _summarize(config, console)
        console.print(f"stopped; to continue: {remedy}", soft_wrap=True, highlight=False)
        raise
    _summarize(config, console)
    return 0


def run_here(
    config: RunConfig,
    console: Console,
    *,
    resume: bool = False,
    new: bool = False,
    live: bool = False,
    background: BackgroundTask | None = None,
) -> None:
    """The whole run, from the missing model to the last books.

    A buffer server without a daemon of ours outlives its runs: a new run must not train on what an
    older one left there.

    Raises:
        Interrupted: a signal stopped the run before its end.
        StreamRLError: a process failed and is not started again.
    """
    if not config.buffer.has_daemon:
        _call("books", config, *([] if resume else ["--forget" if new else "--require-none"]))
    if not Path(config.model.path).exists() and config.model.recipe is not None:
        console.print(f"making {config.model.path} (streamrl make-model)")
        _call("make-model", config)
    if config.parity.is_required:
        require_parity(config, console)
    view = ProgressView(config, console, live=live)
    stopped_by = asyncio.run(
        run_daemons(config, resume=resume, view=view.run, notify=view.print, background=background)
    )
    if not config.buffer.has_daemon:
        with contextlib.suppress(StreamRLError):
            _call("books", config)
    if stopped_by is not None:
        raise Interrupted(stopped_by)


def _call(command: str, config: RunConfig, *arguments: str) -> str:
    return call(command, *arguments, "--config", _config_file(config))


def _evaluate(config: RunConfig) -> None:
    """Score the final checkpoint on held-out prompts; a failure does not fail the run."""
    try:
        _call("evaluate", config)
    except StreamRLError as error:
        print(f"no evaluation: {error}", file=sys.stderr)


def _summarize(config: RunConfig, console: Console) -> None:
    write_report(config)
    console.print(summary(config))


def _config_file(config: RunConfig) -> str:
    """What the run was started with, every value resolved."""
    return str(config.run.path / RESOLVED_FILE)
