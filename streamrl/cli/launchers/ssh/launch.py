"""`streamrl launch` on the hosts of `cluster.hosts` or `--hosts`.

make the model if it has a recipe; reach every host; plan; prepare the run's folder here; make keys;
copy what the hosts lack; start, watch and stop the plan's processes through the hosts' agents;
evaluate where the learner was; report
"""

import argparse
import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.cli.display.summary import summary
from streamrl.cli.display.view import ProgressView
from streamrl.cli.launchers.ssh.child import RemoteChild
from streamrl.cli.launchers.ssh.hosts import (
    connect_all,
    facts_of,
    make_link,
    make_ready,
    with_reports,
)
from streamrl.cli.launchers.ssh.learner_host import LearnerHost
from streamrl.cli.launchers.ssh.link import HostLink
from streamrl.cli.launchers.ssh.secrets import handed_on, with_keys, write_secrets
from streamrl.cli.plan import print_plan
from streamrl.cli.processes.command import call
from streamrl.cli.processes.daemons import GRACE_PERIOD_S, Ending, supervise
from streamrl.cli.processes.planned import planned_children
from streamrl.cli.processes.run_commands import (
    STOPPED_S,
    books_options,
    evaluation_may_fail,
    prepared,
)
from streamrl.cli.processes.sole_launch import sole_launch
from streamrl.cli.report import write_report
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.load import config_file
from streamrl.errors import ConfigError, Interrupted, StreamRLError
from streamrl.placement.assign import make_plan
from streamrl.placement.hosts import hosts_of
from streamrl.placement.plan import Plan, PlannedProcess


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Exit code of the run; with `--dry-run`, of reaching the hosts and making the plan."""
    console = Console()
    _require_no_parity(config)
    if arguments.dry_run:
        require_steps(config, arguments)
        _launched(config, arguments, console)
        return 0
    with sole_launch(config.run.path):
        return _run_and_report(config, arguments, console)


def _run_and_report(config: RunConfig, arguments: argparse.Namespace, console: Console) -> int:
    require_steps(config, arguments)
    _make_model(config, arguments)
    stopped_by, lost = _launched(config, arguments, console)
    write_report(config)
    console.print(summary(config))
    if stopped_by is not None:
        remedy = f"streamrl launch {config.run.path / RESOLVED_FILE} --resume"
        console.print(f"stopped; to continue: {remedy}", soft_wrap=True, highlight=False)
        raise Interrupted(stopped_by)
    if lost is not None:
        raise lost
    return 0


def _launched(config: RunConfig, arguments: argparse.Namespace, console: Console) -> Ending:
    try:
        return asyncio.run(_launch(config, arguments, console))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _launch(given: RunConfig, arguments: argparse.Namespace, console: Console) -> Ending:
    """The run, while the hosts are kept."""
    view = ProgressView(given, console, live=not arguments.no_view)
    links = [make_link(given, host, view.print) for host in given.cluster.hosts]
    try:
        await connect_all(given, links)
        config = with_reports(with_keys(given), links)
        hosts = hosts_of(config, partial(facts_of, links))
        plan = make_plan(config, hosts, resume=arguments.resume)
        if arguments.dry_run:
            print_plan(plan)
            return Ending(None, None)
        plan = replace(plan, config=prepared(plan.config, arguments, binds=False))
        write_secrets(given)
        for note in plan.notes:
            view.print(f"note: {note.sentence}")
        make_ready(plan, links, resume=arguments.resume)
        return await _run(plan, links, view, arguments)
    finally:
        await asyncio.gather(*(link.close(GRACE_PERIOD_S) for link in links))


async def _run(
    plan: Plan, links: Sequence[HostLink], view: ProgressView, arguments: argparse.Namespace
) -> Ending:
    """Keep the hosts, and run the plan's processes on them, with what comes before and after."""
    kept = [asyncio.create_task(link.run()) for link in links]
    learner_host = LearnerHost(plan, links, kept)

    async def watch_hosts(_: object) -> None:
        """Waits for a host that ends the run."""
        done, _ = await asyncio.wait(kept, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    try:
        if not plan.config.buffer.has_daemon:
            options = books_options(resume=arguments.resume, new=arguments.new)
            await learner_host.call("buffer books", *options)
        children = _children(plan, links, view)
        ending = await supervise(
            children,
            view=view.run,
            background=watch_hosts,
            stop_s=plan.config.stop_within_s,
            strict=arguments.strict,
        )
        if not plan.config.buffer.has_daemon:
            with contextlib.suppress(StreamRLError, TimeoutError):
                async with asyncio.timeout(None if ending.stopped_by is None else STOPPED_S):
                    await learner_host.call("buffer books")
        if plan.config.run.evaluate and ending.stopped_by is None:
            with evaluation_may_fail():
                await learner_host.call("evaluate")
        return ending
    finally:
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)


def _children(plan: Plan, links: Sequence[HostLink], view: ProgressView) -> list[RemoteChild]:
    by_host = {link.host: link for link in links}

    def own(process: PlannedProcess) -> Mapping[str, Any]:
        return {"link": by_host[process.host]}

    return planned_children(RemoteChild, plan, view.print, own, handed_on(plan.config))


def require_steps(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Checkpoints stay with the learner: one that is not here is checked where the learner is."""
    named = config.run.resume
    if not isinstance(named, Path) or named.exists():
        require_steps_to_launch(config, resume=arguments.resume, new=arguments.new)


def _require_no_parity(config: RunConfig) -> None:
    if config.parity.is_required:
        raise ConfigError(
            "parity: is compared on one machine, and this run has several: run `streamrl parity` "
            "on one of them first, and leave its limits out here"
        )


def _make_model(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Here, from where the hosts get it."""
    if config.model.recipe is None or Path(config.model.path).exists():
        return
    print(f"making {config.model.path} of model.recipe", flush=True)
    settings = [word for text in arguments.overrides for word in ("--set", text)]
    call("get-model", "--config", config_file(arguments), *settings)
