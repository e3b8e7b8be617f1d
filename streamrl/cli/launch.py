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

from streamrl.cli.display.summary import summary
from streamrl.cli.display.view import ProgressView
from streamrl.cli.parity.compare import require_parity
from streamrl.cli.preflight.child import require_startable
from streamrl.cli.processes.command import call
from streamrl.cli.processes.daemons import BackgroundTask, run_daemons
from streamrl.cli.report import write_report
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import StreamRLError
from streamrl.run_folder import prepare, read_json


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    require_startable(arguments)
    loaded = configuration(arguments)
    config = prepare(loaded.config, resume=arguments.resume, new=arguments.new)
    finished = run_here(
        config, console, resume=arguments.resume, new=arguments.new, live=not arguments.no_view
    )
    if finished and config.run.evaluate:
        _evaluate(config)
    write_report(config.run.path)
    console.print(summary(config))
    if not finished:
        console.print(f"stopped; to continue: streamrl launch {arguments.file} --resume")
    return 0


def run_here(
    config: RunConfig,
    console: Console,
    *,
    resume: bool = False,
    new: bool = False,
    live: bool = False,
    background: BackgroundTask | None = None,
) -> bool:
    """The whole run, from the missing model to the last books; whether it reached its end.

    A buffer server without a daemon of ours outlives its runs: a new run must not train on what an
    older one left there.
    """
    if not config.buffer.has_daemon and not resume:
        _call("books", config, "--forget" if new else "--require-none")
    if not Path(config.model.path).exists() and config.model.recipe is not None:
        console.print(f"making {config.model.path} (streamrl make-model)")
        _call("make-model", config)
    if config.parity.is_required:
        require_parity(config, console)
    view = ProgressView(config, console, live=live)
    finished = asyncio.run(run_daemons(config, resume=resume, view=view.run, background=background))
    if not config.buffer.has_daemon:
        with contextlib.suppress(StreamRLError):
            _call("books", config)
    return finished


def _call(command: str, config: RunConfig, *arguments: str) -> str:
    return call(command, *arguments, "--config", str(config.run.path / "config.yaml"))


def _evaluate(config: RunConfig) -> None:
    """Score the final checkpoint on held-out prompts; a failure does not fail the run."""
    with contextlib.suppress(StreamRLError):
        _call("evaluate", config)
    if not read_json(config.run.path / "evaluation.json"):
        print("no evaluation: see the messages above", file=sys.stderr)
