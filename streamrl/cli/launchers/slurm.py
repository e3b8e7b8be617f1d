"""`streamrl launch FILE --slurm`: a run on the nodes of a Slurm job or allocation, in steps that
this process starts and watches.

    SIGUSR1  Slurm's warning before the time limit: stop in order, save, and requeue the job
    SIGINT   stop in order and save
    SIGTERM  Slurm ends the job, and has signaled every step

srun kills its step if it is signaled itself, so signals go to the step through Slurm (scancel). If
Slurm ends the whole job (scancel, preemption, the time limit, a requeue), every step gets SIGTERM
from Slurm; no second signal is sent then, since it would end the daemons at once.

Invariant: nothing outlives the job, since everything runs in steps. A step is one process of the
plan; its output goes to logs/NAME.log in the run's folder, written on its node. Nodes report their
GPUs from within a step, so they report the GPUs that a step of the run sees.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.cli.display.view import ProgressView
from streamrl.cli.launchers import JOB_VARIABLE
from streamrl.cli.processes.daemons import RemoteChild, make_children, supervise
from streamrl.cli.processes.run_commands import (
    evaluate_final,
    launching,
    make_missing_model,
    require_books,
)
from streamrl.config import RunConfig, to_yaml
from streamrl.config.addresses import address_towards, is_loopback, url_host
from streamrl.curve import make_keys
from streamrl.durable_files import write_file
from streamrl.errors import (
    ERROR_FILE_VARIABLE,
    PARENT_VARIABLE,
    ConfigError,
    ErrorRecord,
    StreamRLError,
    read_record,
)
from streamrl.placement.hosts import this_machine
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Host, Plan, PlannedProcess, without_chosen

# A failed node may hold the run's lock until its lease at the file server ends.
_LOST_LOCK_S = 180.0


class _Requeue:
    """Notes whether SIGUSR1 has come, and then stops the run as SIGINT does."""

    def __init__(self) -> None:
        self.is_wanted = False
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.is_wanted = True
        os.kill(os.getpid(), signal.SIGINT)


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Run the job's part of a launch; return the exit code of the run (with `--dry-run`, of making
    the plan). Raises ConfigError outside a Slurm job."""
    job = _job()
    if job is None:
        raise ConfigError(
            "--slurm: this is no job of Slurm; submit one with `sbatch deploy/slurm/run.sbatch "
            "run.yaml`, or take an allocation with `salloc`"
        )
    console = Console()
    requeue = _Requeue()
    hosts = hosts_of_job()
    keys = config.run.path / "keys"
    has_own_keys = config.buffer.curve is None and len(hosts) > 1
    if has_own_keys:
        config = config.with_values(buffer={"curve": keys})
    if arguments.dry_run:
        require_steps_to_launch(config, resume=arguments.resume, new=arguments.new)
        for process in make_plan(config, hosts, resume=arguments.resume).processes:
            log = config.run.path / "logs" / f"{process.name}.log"
            place = (process.name, process.host, process.command, process.environment, log)
            print(shlex.join(step_command(*place)))
        return 0
    try:
        with launching(config, arguments, console, are_rows_checked=True, wait_s=_LOST_LOCK_S) as (
            config,
            _,
        ):
            if has_own_keys and not keys.exists():
                make_keys(keys)
            plan = make_plan(config, hosts, resume=arguments.resume)
            write_file(plan.config_file, to_yaml(plan.config))
            _run(plan, arguments, console, job)
    except KeyboardInterrupt:
        if not requeue.is_wanted:
            raise
        console.print(f"job {job} goes on when it is its turn again")
        subprocess.run(["scontrol", "requeue", job], check=False)
    return 0


def _job() -> str | None:
    """The job's id, as Slurm's commands take it. One task of an array has the array's own id, which
    would mean every task to the commands; it is named ARRAY_TASK instead."""
    job, array = os.environ.get(JOB_VARIABLE), os.environ.get("SLURM_ARRAY_JOB_ID")
    return job if job is None or job != array else f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def _run(plan: Plan, arguments: argparse.Namespace, console: Console, job: str) -> None:
    """Run the plan's processes and the final evaluation. Raises as `supervise` does."""
    config = plan.config
    require_books(config, resume=arguments.resume, new=arguments.new)
    make_missing_model(config, console)
    view = ProgressView(config, console, live=not arguments.no_view)
    lost = asyncio.run(
        supervise(
            _children(plan, view, job),
            view=view.run,
            notify=view.print,
            stop_s=config.stop_within_s,
            strict=arguments.strict,
        )
    )
    evaluate_final(config)
    if lost is not None:
        raise lost


def _children(plan: Plan, view: ProgressView, job: str) -> "list[StepChild]":
    may_be_lost = {
        host.name
        for host in plan.hosts
        if plan.config.cluster.on_host_failure == "continue"
        and {process.role for process in plan.on(host.name)} <= {"generator", "validator"}
    }

    def own(process: PlannedProcess) -> Mapping[str, Any]:
        return {"node": process.host, "job": job, "may_be_lost": process.host in may_be_lost}

    return make_children(StepChild, plan, view.print, own)


# Steps share all of the job's cores, memory and GPUs on a node.
ON_NODES = ("--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0", "--quiet")
# The shell's parent, which the process watches, is Slurm's step daemon.
_SCRIPT = (
    f'log=$1; shift; {PARENT_VARIABLE}=$PPID; export {PARENT_VARIABLE}; exec "$@" >>"$log" 2>&1'
)
NODE_CHECK_S, CANCEL_S = 15.0, 5.0
_GONE = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN")


@dataclass(kw_only=True)
class StepChild(RemoteChild):
    """A child that runs as a step. If its node fails, the child ends; the run continues if it
    `may_be_lost`."""

    node: str
    job: str
    may_be_lost: bool = False
    _signaling: "set[asyncio.Task[None]]" = field(default_factory=set)
    _lost: bool = False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Have Slurm send SIGINT, which drains, or SIGKILL."""
        self.begin_stop()
        if self.process is None or self.process.returncode is not None:
            return
        self._begin_signal("KILL" if number == signal.SIGKILL else "INT")

    def begin_kill(self) -> None:
        self._begin_signal("KILL")

    def _begin_signal(self, name: str) -> None:
        task = asyncio.create_task(self._signal(name))
        self._signaling.add(task)
        task.add_done_callback(self._signaling.discard)

    async def _signal(self, name: str) -> None:
        if name != "KILL":
            # Otherwise Slurm has already told every step to end.
            state = await _output("squeue", "--noheader", f"--jobs={self.job}", "-o", "%T")
            if state.strip() != "RUNNING":
                return
        steps = await _output(
            "squeue", "--noheader", "--steps", f"--jobs={self.job}", "-o", "%i %j"
        )
        for line in steps.splitlines():
            step, _, step_name = line.strip().partition(" ")
            if step_name.strip() == self.role:
                # A failed node does not answer.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_output("scancel", f"--signal={name}", step), CANCEL_S)
        if name == "KILL" and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Start the step; return its exit code and record. Waits for its end."""
        record = self.log_file.with_name(f".{self.role}.error")
        record.unlink(missing_ok=True)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        self.process = await asyncio.create_subprocess_exec(
            *step_command(
                self.role, self.node, self._next_command, self.environment, self.log_file
            ),
            stdin=DEVNULL,
            start_new_session=True,
            # srun passes this environment on; PATH finds the commands of this Python first.
            env={**os.environ, "PATH": path, ERROR_FILE_VARIABLE: str(record.resolve())},
        )
        self.budget.on_start()
        self.state = "running"
        if self.stopping.is_set():
            self.stop()
        code = await self._wait(self.process)
        self._lost = code != 0 and await self._node_is_gone()
        return (128 - code if code > 128 else code), read_record(record)

    async def _wait(self, process: Process) -> int:
        """Return the exit code of srun. Waits for its end; since srun continues even if its node
        has failed, asks Slurm about the node every NODE_CHECK_S."""
        ending = asyncio.create_task(process.wait())
        while not (await asyncio.wait({ending}, timeout=NODE_CHECK_S))[0]:
            if await self._node_is_gone():
                process.kill()
        return ending.result()

    async def _node_is_gone(self) -> bool:
        shown = await _output("scontrol", "show", "--oneliner", "node", self.node)
        words = [word for word in shown.split() if word.startswith("State=")]
        return bool(words) and any(state in words[0] for state in _GONE)

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        if self._lost:
            self.is_optional = self.may_be_lost
            raise StreamRLError(f"{self.role}: its node {self.node} has failed")
        return super()._delay_s(code, record)


def step_command(
    name: str, node: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path
) -> Sequence[str]:
    """The command that starts a step. Variables are set on the node, since Slurm itself sets
    CUDA_VISIBLE_DEVICES."""
    place = ("--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={name}", *ON_NODES)
    script = ("sh", "-c", _SCRIPT, name, str(log_file))
    planned = without_chosen(environment, os.environ)
    settings = (f"{key}={value}" for key, value in planned.items())
    return ("srun", *place, *script, "env", *settings, *command)


async def _output(*command: str) -> str:
    """Standard output of one of Slurm's commands; "" if it prints nothing. Waits for its end."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    return (await process.communicate())[0].decode()


def hosts_of_job() -> tuple[Host, ...]:
    """The job's hosts in Slurm's order; the launcher runs on the first one. Waits for all to
    answer.

    Raises:
        ConfigError: there is no Slurm here.
        StreamRLError: Slurm does not answer, or a node does not.
    """
    names = _said("scontrol", "show", "hostnames").split()
    # Run this module on each node; see `main`.
    step = ["srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    said = _said(*step, *ON_NODES, sys.executable, "-P", "-m", __name__)
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    facts = {answer["name"]: answer for answer in answers}
    if missing := sorted(set(names) - set(facts)):
        raise StreamRLError(f"node {missing[0]} of the job did not answer")
    return tuple(msgspec.convert(facts[name], Host) for name in names)


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"--slurm: there is no `{command[0]}` here") from None
    if done.returncode != 0:
        raise StreamRLError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """On a node: print its name, address and hardware as a line of JSON."""
    name = os.environ["SLURMD_NODENAME"]
    address = _address(name)
    others = [other for other in _said("scontrol", "show", "hostnames").split() if other != name]
    if others and is_loopback(f"tcp://{url_host(address)}:0"):
        # A machine may resolve its own name to a loopback address, as on Debian. The other nodes
        # reach it at the address on the route to them.
        address = address_towards(_address(others[0]))
    print(json.dumps(asdict(this_machine(name, address))), flush=True)


def _address(node: str) -> str:
    shown = _said("scontrol", "show", "--oneliner", "node", node)
    found = re.search(r"NodeAddr=(\S+)", shown)
    address = found.group(1) if found else node
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(address)
    return address


if __name__ == "__main__":
    main()
