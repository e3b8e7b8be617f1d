"""A host behind a stand-in of ssh: how it is reached, refused, lost, found again and left."""

import asyncio
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from streamrl import __version__
from streamrl.cli.launchers.ssh import link as links
from streamrl.cli.launchers.ssh.agent.processes import MARK, HostProcesses
from streamrl.cli.launchers.ssh.child import RemoteChild
from streamrl.cli.launchers.ssh.command import agent_command
from streamrl.cli.launchers.ssh.connection import Connection, HostLostError
from streamrl.cli.launchers.ssh.frames import Begin, Join, Joined, Start
from streamrl.cli.launchers.ssh.link import HostLink
from streamrl.cli.processes.restarts import RestartBudget
from streamrl.config.run import RunSettings
from streamrl.errors import ConfigError
from streamrl.log_lines import FORMAT_VARIABLE
from tests.standins.ssh_command import write_ssh
from tests.waiting import until as waiting_until

WAIT_S = 60.0
until = partial(waiting_until, deadline_s=WAIT_S)


class Hosts:
    """The stand-in, and links through it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.homes = folder, write_ssh(folder)
        self.notices: list[str] = []

    def link(self, host: str, *, python: str = sys.executable, **changes: object) -> HostLink:
        silence_s = float(str(changes.pop("silence_s", 60.0)))
        at = Path(str(changes.pop("at", "work")))
        command = agent_command(host, at, python, silence_s, WAIT_S)
        return HostLink(
            host,
            Begin(host=host, address="127.0.0.1", silence_s=silence_s),
            __version__,
            WAIT_S,
            lambda sees: Connection.open(command, sees),
            self.notices.append,
            prepare=self._join,
            **changes,  # type: ignore[arg-type]
        )

    async def _join(self, connection: Connection) -> None:
        connection.send(Join(folder="runs/run", launch_id="x"))
        await connection.answer(Joined)

    def child(self, link: HostLink, script: str) -> RemoteChild:
        settings = RunSettings(max_restarts=3)
        return RemoteChild(
            *("generator-0", ("sh", "-c", script), ("sh", "-c", f"again=1; {script}")),
            *(self.folder / "unused.log", RestartBudget(settings, 0), lambda: 0),
            self.notices.append,
            link=link,
        )


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.01)
    return made


def marked(folder: Path) -> list[int]:
    """Processes that an agent of this test has started."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if str(folder) in ((process.info["environ"] or {}).get(MARK) or "")
    ]


OTHER_RELEASE = """#!/bin/sh
exec {python} -c "
import streamrl
streamrl.__version__ = '0.0.9'
import runpy
runpy.run_module('streamrl.cli.launchers.ssh.agent', run_name='__main__')"
"""


@pytest.mark.parametrize(
    ("host", "sentence", "is_final"),
    [
        ("stranger", "host stranger: Host key verification failed: connect once by hand", True),
        ("locked", r"host locked: .*Permission denied \(publickey\): ssh may ask for noth", True),
        ("closed", "host closed: ssh: connect to host closed port 22: Connection refused$", False),
    ],
)
async def test_what_ssh_refuses_is_one_sentence(hosts: Hosts, host, sentence, is_final):
    with pytest.raises(HostLostError, match=sentence) as refused:
        await hosts.link(host).connect()
    assert refused.value.is_final is is_final
    assert not hosts.homes.exists()


async def test_a_host_without_streamrl_or_python_says_so(hosts: Hosts, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bare = sys._base_executable  # type: ignore[attr-defined]
    with pytest.raises(HostLostError, match=r"No module named 'streamrl'.*cluster\.python"):
        await hosts.link("a", python=bare).connect()
    with pytest.raises(HostLostError, match=r"/no/python: not found: cluster\.python names"):
        await hosts.link("a", python="/no/python").connect()


async def test_another_release_on_a_host_is_refused(hosts: Hosts, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(OTHER_RELEASE.format(python=sys.executable))
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"host a: .* has StreamRL 0\.0\.9, .* {__version__}: "):
        await hosts.link("a", python=str(python)).connect()


async def test_ssh_asks_for_nothing_and_names_may_hold_any_character(hosts: Hosts):
    link = hosts.link("me@a:2222", at="it's a $HOME; folder")
    await link.connect()
    call = (hosts.folder / "calls.txt").read_text()
    assert "-o BatchMode=yes" in call
    assert "StrictHostKeyChecking" not in call
    assert "-p 2222 -- me@a " in call
    assert (hosts.homes / "me@a" / "it's a $HOME; folder").is_dir()
    await link.close(WAIT_S)


async def test_a_lost_host_that_may_fail_gets_its_processes_again(hosts: Hosts):
    link = hosts.link("a", may_fail=True)
    child = hosts.child(link, "echo $again- >> starts; sleep 600")
    kept, supervised = asyncio.create_task(link.run()), asyncio.create_task(child.supervise())
    starts = hosts.homes / "a" / "work" / "starts"
    await until(starts.exists)
    (hosts.folder / "a.down").touch()
    assert link.connection is not None
    link.connection.abort()
    await until(lambda: child.state == "waits for host a" and len(hosts.notices) == 1)
    await until(lambda: (hosts.folder / "calls.txt").read_text().count("\n") > 3)
    assert "the run goes on without its generators until it answers" in hosts.notices[0]
    (hosts.folder / "a.down").unlink()
    await until(lambda: starts.read_text() == "-\n1-\n")
    assert hosts.notices[1:] == ["host a answers: its processes are started again"]
    child.stop()
    await supervised
    kept.cancel()
    await link.close(WAIT_S)
    assert marked(hosts.folder) == []


async def test_a_lost_host_that_may_not_fail_ends_the_run(hosts: Hosts):
    link = hosts.link("a")
    kept = asyncio.create_task(link.run())
    await until(link.ready.is_set)
    assert link.connection is not None
    link.connection.abort()
    with pytest.raises(HostLostError, match=r"^host a: the connection has ended$"):
        await kept
    assert hosts.notices == []


async def test_a_process_that_fails_is_started_again_by_its_budget(hosts: Hosts):
    link = hosts.link("a", may_fail=True)
    child = hosts.child(link, "echo $again- >> starts; exit 9")
    kept = asyncio.create_task(link.run())
    with pytest.raises(Exception, match=r"^generator-0: ended with exit code 9; started again 3 "):
        await child.supervise()
    work = hosts.homes / "a" / "work"
    assert (work / "starts").read_text() == "-\n1-\n1-\n1-\n"
    log = (work / "runs/run/logs/generator-0.log").read_text()
    assert log.count("launcher: generator-0 ended with exit code 9") == 4
    kept.cancel()
    await link.close(WAIT_S)


async def test_a_host_logs_the_end_of_a_process_in_the_format_of_the_run(hosts: Hosts):
    link = hosts.link("a", may_fail=True)
    child = hosts.child(link, "exit 2")
    child.environment = {**child.environment, FORMAT_VARIABLE: "json"}
    kept = asyncio.create_task(link.run())
    with pytest.raises(Exception, match=r"^generator-0: ended with exit code 2"):
        await child.supervise()
    log = (hosts.homes / "a" / "work" / "runs/run/logs/generator-0.log").read_text()
    line = json.loads(log)
    assert (line["role"], line["logger"]) == ("generator-0", "launcher")
    assert line["message"] == "ended with exit code 2"
    kept.cancel()
    await link.close(WAIT_S)


async def test_parts_of_one_learner_are_started_again_together(hosts: Hosts):
    link = hosts.link("a")
    first, second = (hosts.child(link, f"echo >> {i}; sleep 600") for i in ("first", "second"))
    first.role, second.role = "learner", "learner-host-1"
    first.companions, second.companions = [second], [first]
    tasks = [asyncio.create_task(work) for work in (link.run(), *map(_supervise, (first, second)))]
    work = hosts.homes / "a" / "work"
    await until(lambda: (work / "first").exists() and (work / "second").exists())
    assert link.connection is not None
    link.connection.signal("learner-host-1", signal.SIGKILL)
    await until(lambda: [len((work / f).read_text()) for f in ("first", "second")] == [2, 2])
    assert [child.num_restarts for child in (first, second)] == [1, 1]
    for child in (first, second):
        child.stop()
    await asyncio.gather(*tasks[1:])
    tasks[0].cancel()
    await link.close(WAIT_S)


async def test_a_part_that_lost_another_one_leaves_it_the_time_to_say_why(hosts: Hosts):
    """A configuration that cannot work, found by the second part only, is not tried again."""
    link = hosts.link("a")
    first = hosts.child(link, "echo >> first; while ! test -e failed; do sleep 0.01; done; exit 5")
    second = hosts.child(link, "echo >> second; touch failed; sleep 0.5; exit 2")
    first.role, second.role = "learner", "learner-host-1"
    first.companions, second.companions = [second], [first]
    kept, lost = (asyncio.create_task(work) for work in (link.run(), _supervise(first)))
    with pytest.raises(ConfigError, match=r"^learner-host-1: ended with exit code 2"):
        await second.supervise()
    work = hosts.homes / "a" / "work"
    assert (work / "second").read_text() == "\n"
    first.stop()
    await lost
    kept.cancel()
    await link.close(WAIT_S)


async def _supervise(child: RemoteChild) -> int:
    return await child.supervise()


async def test_what_a_process_leaves_behind_is_ended_with_it(hosts: Hosts):
    link = hosts.link("a")
    await link.connect()
    assert link.connection is not None
    await hosts._join(link.connection)
    orphan = "setsid sh -c 'trap : TERM; sleep 600' & sleep 0.2; exit 3"
    ended = await link.connection.run(Start(name="x", command=("sh", "-c", orphan)))
    assert ended.exit_code == 3
    assert marked(hosts.folder) == []
    await link.close(WAIT_S)


async def test_a_signal_reaches_a_process_that_is_being_started(tmp_path: Path):
    processes = HostProcesses(tmp_path, "host")
    process = processes.run(Start(name="learner", command=("sleep", "600")))
    processes.send("learner", signal.SIGTERM)
    ended = await asyncio.wait_for(process, WAIT_S)
    assert ended.exit_code == -signal.SIGTERM


async def test_a_host_that_hears_nothing_ends_its_processes(hosts: Hosts):
    link = hosts.link("a", silence_s=2.0)
    await link.connect()
    assert link.connection is not None
    await hosts._join(link.connection)
    running = asyncio.create_task(link.connection.run(Start(name="x", command=("sleep", "600"))))
    await until(lambda: len(marked(hosts.folder)) == 1)
    with pytest.raises(HostLostError, match="it heard nothing for 2 s"):
        await running
    assert marked(hosts.folder) == []


async def test_a_host_that_is_taken_away_with_notice_lets_its_processes_drain(hosts: Hosts):
    link = hosts.link("a", may_fail=True)
    child = hosts.child(
        link, "trap 'echo >> drained; exit 0' TERM; echo >> starts; sleep 600 & wait"
    )
    kept, supervised = asyncio.create_task(link.run()), asyncio.create_task(child.supervise())
    work = hosts.homes / "a" / "work"
    await until((work / "starts").exists)
    (hosts.folder / "a.down").touch()
    os.kill(int((work / "runs/.run.a.agent").read_text()), signal.SIGTERM)
    await until(lambda: len(hosts.notices) == 1)
    assert hosts.notices[0].startswith("host a: its agent got SIGTERM and ends its processes; ")
    assert (work / "drained").exists()
    assert marked(hosts.folder) == []
    (hosts.folder / "a.down").unlink()
    await until(lambda: (work / "starts").read_text() == "\n\n")
    child.stop()
    await supervised
    kept.cancel()
    await link.close(WAIT_S)


async def test_a_second_agent_of_a_run_ends_the_first_one_and_its_processes(hosts: Hosts):
    first, second = hosts.link("a"), hosts.link("a")
    for link in (first, second):
        await link.connect()
    assert first.connection is not None
    assert second.connection is not None
    await hosts._join(first.connection)
    running = asyncio.create_task(first.connection.run(Start(name="x", command=("sleep", "600"))))
    await until(lambda: len(marked(hosts.folder)) == 1)
    await hosts._join(second.connection)
    assert marked(hosts.folder) == []
    with pytest.raises(HostLostError):
        await running
    await second.close(WAIT_S)
