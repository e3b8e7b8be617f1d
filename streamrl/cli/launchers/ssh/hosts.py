"""The links to all hosts of a run: which may fail, what they report, how they are made ready.

Invariant: the plan is made from what the hosts report; a host that does not answer at the start is
waited for, or, if it may fail and its settings leave nothing open, planned without its answer.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from streamrl import __version__
from streamrl.cli.launchers.ssh.command import agent_command
from streamrl.cli.launchers.ssh.connection import Connection, HostLostError
from streamrl.cli.launchers.ssh.files import copy
from streamrl.cli.launchers.ssh.frames import Begin, Gather, Hello, Join, Joined
from streamrl.cli.launchers.ssh.gathered import sizes_of, write_part
from streamrl.cli.launchers.ssh.link import HostLink
from streamrl.config import RunConfig
from streamrl.config.cluster import HostSettings
from streamrl.placement.hosts import HostFacts, is_here
from streamrl.placement.plan import Device, Plan

RETRY_S = 2.0
_RECORDS = ("*.jsonl", "*.json")


def make_link(config: RunConfig, host: HostSettings, notify: Callable[[str], None]) -> HostLink:
    """To the agent of the host, which nothing has reached yet."""
    cluster = config.cluster
    is_local = is_here(host) and not host.ssh
    command = agent_command(
        "" if is_local else host.ssh or host.reachable_at,
        Path.cwd() if is_local else cluster.folder,
        cluster.python,
        cluster.silence_s,
        cluster.start_s,
    )
    return HostLink(
        host=host.name,
        begin=Begin(host=host.name, address=host.reachable_at, silence_s=cluster.silence_s),
        release=__version__,
        connect_s=cluster.start_s,
        open_agent=lambda sees: Connection.open(command, sees),
        notify=notify,
        may_fail=cluster.on_host_failure == "continue" and set(host.roles) == {"generator"},
    )


async def connect_all(config: RunConfig, links: Sequence[HostLink]) -> None:
    """Reach every host. Waits `cluster.start_s` for those that have to answer.

    Raises:
        HostLostError: one of them does not.
        ConfigError: one has another release.
    """
    settings = {host.name: host for host in config.cluster.hosts}
    async with asyncio.TaskGroup() as tasks:
        for link in links:
            is_told = settings[link.host].devices != "auto" and settings[link.host].cores
            tasks.create_task(_connect(link, may_be_late=link.may_fail and bool(is_told)))


async def _connect(link: HostLink, *, may_be_late: bool) -> None:
    """Once, if the plan can do without the answer; else until it answers, for `connect_s`: a host
    may be starting."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + link.connect_s
    while True:
        try:
            await link.connect()
            return
        except HostLostError as error:
            if may_be_late:
                link.notify(f"{error}; the run starts without it")
                return
            if error.is_final or loop.time() + RETRY_S > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


def with_reports(config: RunConfig, links: Sequence[HostLink]) -> RunConfig:
    """The configuration with the cores and interfaces that hosts report, where settings leave them
    open."""
    hellos = {link.host: link.hello or Hello() for link in links}
    hosts = tuple(
        host.model_copy(
            update={
                "cores": host.cores or hellos[host.name].num_cores or None,
                "interface": host.interface or hellos[host.name].interface,
            }
        )
        for host in config.cluster.hosts
    )
    cluster = config.cluster.model_copy(update={"hosts": hosts})
    return config.model_copy(update={"cluster": cluster})


def facts_of(links: Sequence[HostLink], host: HostSettings) -> HostFacts:
    """What the agent of the host has reported."""
    hello = next(link.hello for link in links if link.host == host.name) or Hello()
    devices = tuple(Device(d.index, d.memory_bytes, d.name, d.visible_as) for d in hello.devices)
    return HostFacts(devices, hello.num_cores, hello.is_counted, hello.interface)


def make_ready(plan: Plan, links: Sequence[HostLink], *, resume: bool) -> None:
    """Say what each link does when its host is reached: join the run, copy, gather."""
    folder = plan.config.run.path
    one_at_a_time, launch_id = asyncio.Lock(), write_launch_id(folder)
    for link in links:
        roles = {process.role for process in plan.on(link.host)}
        may_go_on = plan.config.cluster.on_host_failure == "continue"
        link.may_fail = may_go_on and roles <= {"generator"}
        link.sees = partial(write_part, folder)
        link.prepare = partial(
            _prepare,
            plan,
            link,
            Join(folder=str(folder), launch_id=launch_id, resume=resume),
            one_at_a_time,
        )


async def _prepare(
    plan: Plan, link: HostLink, join: Join, one_at_a_time: asyncio.Lock, connection: Connection
) -> None:
    async with one_at_a_time:
        connection.send(join)
        joined = await connection.answer(Joined)
    await copy(connection, plan, link.host, shares_folder=joined.shares_folder)
    if not joined.shares_folder:
        patterns = patterns_of(plan, link.host)
        connection.send(Gather(patterns=patterns, sizes=sizes_of(plan.config.run.path, patterns)))


def patterns_of(plan: Plan, host: str) -> tuple[str, ...]:
    """Files of the run's folder that the launching machine wants of this host."""
    processes = plan.on(host)
    logs = (f"logs/{process.name}.log" for process in processes)
    roles = {process.role for process in processes}
    if any(process.name == "learner" for process in processes):
        return (*logs, "logs/learner*.log", "logs/evaluate.log", *_RECORDS)
    return (*logs, *(["books.json"] if "buffer" in roles else []))


def write_launch_id(folder: Path) -> str:
    """By this file a host that sees the same folder knows it."""
    launch_id = uuid.uuid4().hex
    (folder / "launch.id").write_text(launch_id)
    return launch_id
