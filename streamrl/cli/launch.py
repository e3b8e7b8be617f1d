"""`streamrl launch`: runs everything a run needs on this machine, as separate processes.

A launch checks the run; makes the model if it has a recipe; compares engine and learner if `parity`
sets a threshold; runs buffer, learner and generators until the learner ends or a signal arrives;
evaluates; and reports.
"""

import argparse
import asyncio
import os
from pathlib import Path

from rich.console import Console

from streamrl.cli.check.before_launch import require_startable
from streamrl.cli.display.view import ProgressView
from streamrl.cli.launchers import JOB_VARIABLE, chosen, launcher
from streamrl.cli.parity.compare import require_parity
from streamrl.cli.plan import print_plan
from streamrl.cli.processes.daemons import BackgroundTask, make_children, supervise
from streamrl.cli.processes.fork_server import ForkServer
from streamrl.cli.processes.restarts import Child
from streamrl.cli.processes.run_commands import (
    evaluate_final,
    launching,
    make_missing_model,
    require_books,
)
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.load import config_file, load_usable
from streamrl.config.secrets import hand_down
from streamrl.errors import ConfigError, StreamRLError
from streamrl.placement.hosts import is_rocm, this_machine, usable_devices
from streamrl.placement.make_plan import make_plan
from streamrl.run_folder import require_own_folder, resume_command

# Variables that are set in pods made for torchrun, such as Kubeflow's.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: argparse.Namespace, fork_server: ForkServer | None) -> int:
    """Launch on this machine, or where the options say; return the exit code."""
    for name in _OF_RANKS:
        # With these set, a learner would wait for ranks that nobody starts; a launch starts its
        # own ranks.
        os.environ.pop(name, None)
    loaded, refusal = load_usable(config_file(arguments), arguments.overrides)
    hand_down(arguments, loaded.config.buffer.password_of_url)
    name = chosen(arguments)
    if fork_server is not None and (name or arguments.dry_run or is_rocm() or usable_devices()):
        fork_server.close()
        fork_server = None
    if not name or (name == "slurm" and JOB_VARIABLE in os.environ):
        # Only in these cases does this process see what the run's processes will have.
        require_startable(arguments)
    if refusal is not None:
        raise refusal
    if arguments.resume:
        require_own_folder(loaded.config, Path(config_file(arguments)))
    if name:
        if loaded.config.parity.is_required:
            raise ConfigError(
                "parity: is compared on one machine, and this run has several: run `streamrl "
                "parity` on one of them first, and leave its limits out here"
            )
        return launcher(name)(loaded.config, arguments)
    if arguments.dry_run:
        print_plan(make_plan(loaded.config, [this_machine()], resume=arguments.resume))
        return 0
    return _launch(loaded.config, arguments, fork_server)


def _launch(
    config: RunConfig, arguments: argparse.Namespace, fork_server: ForkServer | None
) -> int:
    console = Console()
    remedy = ""
    try:
        with launching(config, arguments, console, are_rows_checked=True) as (config, _):
            lost = run_here(
                config,
                console,
                resume=arguments.resume,
                new=arguments.new,
                live=not arguments.no_view,
                strict=arguments.strict,
                fork_server=fork_server,
            )
            remedy = f"streamrl evaluate {config.run.path / RESOLVED_FILE}"
            evaluate_final(config, fork_server)
            if lost is not None:
                raise lost
    except KeyboardInterrupt:
        remedy = remedy or resume_command(config.run.path)
        console.print(f"stopped; to continue: {remedy}", soft_wrap=True, highlight=False)
        raise
    return 0


def run_here(
    config: RunConfig,
    console: Console,
    *,
    resume: bool = False,
    new: bool = False,
    live: bool = False,
    strict: bool = False,
    fork_server: ForkServer | None = None,
    background: BackgroundTask | None = None,
) -> StreamRLError | None:
    """Run everything on this machine, from making the model to the buffer's last books. Returns the
    failure of a validator without which the run went on. `resume` continues the run in its folder,
    `new` starts one; `live` shows a live screen; under `strict` no daemon is restarted; daemons are
    forked from `fork_server`, if given.

    Raises:
        Interrupted, StreamRLError: see `supervise`.
    """
    require_books(config, resume=resume, new=new)
    make_missing_model(config, console, fork_server)
    if config.parity.is_required:
        require_parity(config, console)
    view = ProgressView(config, console, live=live)
    plan = make_plan(config, [this_machine()], resume=resume)
    forked = {"fork_server": fork_server}
    return asyncio.run(
        supervise(
            make_children(Child, plan, view.print, lambda _: forked),
            view=view.run,
            notify=view.print,
            background=background,
            stop_s=config.stop_within_s,
            strict=strict,
        )
    )
