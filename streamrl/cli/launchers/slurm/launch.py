"""`streamrl launch FILE --slurm`: a run within a job of Slurm or an allocation, on its nodes, by
steps that this process starts and watches.

ask the nodes; plan; write the plan's configuration; make the model if it has a recipe; run
the steps until the learner ends or a signal comes; evaluate; report

    SIGUSR1  Slurm's warning before the time limit: stop in order, save, and wait in the queue again
    SIGINT   stop in order and save
    SIGTERM  Slurm ends the job, and has told every step

Invariant: nothing outlives the job; what runs in it are steps.
"""

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rich.console import Console

from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.cli.display.view import ProgressView
from streamrl.cli.launchers import JOB_VARIABLE
from streamrl.cli.launchers.slurm.steps import StepChild, hosts_of_job, step_command
from streamrl.cli.processes.daemons import make_children, supervise
from streamrl.cli.processes.run_commands import (
    evaluate_final,
    launching,
    make_missing_model,
    require_books,
)
from streamrl.config import RunConfig, to_yaml
from streamrl.curve import make_keys
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, Interrupted
from streamrl.placement.assign import make_plan
from streamrl.placement.plan import Plan, PlannedProcess

# A node that has failed may hold the run's lock until the file server's lease of it ends.
_LOST_LOCK_S = 180.0


class _Requeue:
    """Whether SIGUSR1 has come; it then stops the run as SIGINT does."""

    def __init__(self) -> None:
        self.is_wanted = False
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.is_wanted = True
        os.kill(os.getpid(), signal.SIGINT)


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Exit code of the run; with `--dry-run`, of making the plan.

    Raises:
        ConfigError: this is no job of Slurm.
    """
    job = os.environ.get(JOB_VARIABLE)
    if job is None:
        raise ConfigError(
            "--slurm: this is no job of Slurm; submit one with `sbatch deploy/slurm/run.sbatch "
            "run.yaml`, or take an allocation with `salloc`"
        )
    console = Console()
    requeue = _Requeue()
    hosts = hosts_of_job()
    has_own_keys = config.buffer.curve is None and len(hosts) > 1
    if has_own_keys:
        buffer = config.buffer.model_copy(update={"curve": config.run.path / "keys"})
        config = config.model_copy(update={"buffer": buffer})
    if arguments.dry_run:
        require_steps_to_launch(config, resume=arguments.resume, new=arguments.new)
        _print(make_plan(config, hosts, resume=arguments.resume))
        return 0
    try:
        with launching(config, arguments, console, wait_s=_LOST_LOCK_S) as (config, _):
            if has_own_keys and not (config.run.path / "keys").exists():
                make_keys(config.run.path / "keys")
            plan = make_plan(config, hosts, resume=arguments.resume)
            write_file(plan.config_file, to_yaml(plan.config))
            _run(plan, arguments, console, job)
    except KeyboardInterrupt:
        if not requeue.is_wanted:
            raise
        console.print(f"job {job} goes on when it is its turn again")
        subprocess.run(["scontrol", "requeue", job], check=False)
    return 0


def _run(plan: Plan, arguments: argparse.Namespace, console: Console, job: str) -> None:
    """
    Raises:
        Interrupted: a signal stopped the run before its end.
        StreamRLError: a process failed and is not started again.
    """
    config = plan.config
    require_books(config, resume=arguments.resume, new=arguments.new)
    make_missing_model(config, console)
    view = ProgressView(config, console, live=not arguments.no_view)
    stopped_by, lost = asyncio.run(
        supervise(
            _children(plan, view, job),
            view=view.run,
            notify=view.print,
            background=None,
            stop_s=config.stop_within_s,
            strict=arguments.strict,
        )
    )
    if stopped_by is not None:
        raise Interrupted(stopped_by)
    evaluate_final(config)
    if lost is not None:
        raise lost


def _children(plan: Plan, view: ProgressView, job: str) -> list[StepChild]:
    may_be_lost = {
        host.name
        for host in plan.hosts
        if plan.config.cluster.on_host_failure == "continue"
        and {process.role for process in plan.on(host.name)} <= {"generator", "validator"}
    }

    def own(process: PlannedProcess) -> Mapping[str, Any]:
        return {"node": process.host, "job": job, "may_be_lost": process.host in may_be_lost}

    return make_children(StepChild, plan, view.print, own)


def _print(plan: Plan) -> None:
    logs = plan.config.run.path / "logs"
    for process in plan.processes:
        words = step_command(
            process.name,
            process.host,
            process.command,
            process.environment,
            logs / f"{process.name}.log",
        )
        print(shlex.join(words))
