"""`streamrl launch` on hosts that are reached by ssh: machines made of namespaces, a real sshd on
each, and everything that happens to hosts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.tracking.jsonl import read_metrics
from tests.deploy import namespaces
from tests.deploy.namespaces import Machine, Network
from tests.system.conftest import CONFIG

if why := namespaces.missing():
    pytest.skip(f"ssh: {why}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
STREAMRL = str(Path(sys.executable).with_name("streamrl"))
DEADLINE_S = 240.0
LEASE_S = 3.0


class Run:
    """A launch on one of the machines, seen from outside."""

    def __init__(
        self, desk: Machine, folder: Path, *arguments: str, file: str = "run.yaml"
    ) -> None:
        self.desk, self.folder = desk, folder
        self.output_file = desk.home / "output.txt"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                desk.command(STREAMRL, "launch", file, "--no-view", *arguments),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for the condition; unblocked by it, by the launch's end, or the deadline."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline_s or (self.process.poll() is not None):
                assert condition(), f"{what}: {self.output}{self.logs()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.lines) >= step, f"step {step}")

    def until_generators(self, count: int) -> None:
        """So many report, as of the newest step."""
        self.until(
            lambda: [line["generator/count"] for line in self.lines[-1:]] == [count],
            f"{count} generators",
        )

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.output, text)

    def signal(self, number: signal.Signals) -> None:
        """To the launcher, as a person's terminal or the kernel does."""
        found = [pid for words, pid in self.desk.processes().items() if "streamrl launch" in words]
        assert len(found) == 1, self.desk.processes()
        os.kill(found[0], number)

    def end(self) -> int:
        self.process.wait(DEADLINE_S)
        return self.process.returncode

    def logs(self) -> str:
        files = sorted(self.folder.glob("logs/*.log"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)


def write_config(net: Network, folder: str, hosts: str) -> None:
    text = CONFIG.format(folder=folder, model="models/copy")
    addresses = {name: host.address for name, host in net.hosts.items()}
    cluster = f"cluster:\n  silence_s: 60\n  start_s: 60\n  hosts:\n{hosts.format(**addresses)}"
    (net.hosts["desk"].home / "run.yaml").write_text(f"{text}{cluster}")


def audit(machine: Machine, folder: Path) -> str:
    return machine.run(STREAMRL, "buffer", "audit", str(folder))


def assert_nothing_is_left(net: Network, *names: str) -> None:
    """Waits for what ends by itself."""
    deadline_s = time.monotonic() + DEADLINE_S
    while left := {name: found for name in names if (found := net.hosts[name].processes())}:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
    for name in names:
        assert net.hosts[name].run("ls", "/dev/shm") == "", name
        assert "127" not in net.hosts[name].run("ss", "-Hltn", "not sport = :22"), name


# A run of the user's own code, in two files, that takes its time until the faults are over.
REWARD = """
import pace

def score(episodes, is_slow):
    pace.keep(is_slow)
    return [float(episode.response == episode.prompt.answer) for episode in episodes]
"""
PACE = """
import os, time

def keep(is_slow):
    if os.path.exists(is_slow):
        time.sleep(2)
"""

RANKS = """
  - {{name: a, address: {a}, generators: 1}}
  - {{name: b, address: {b}, generators: 1}}
  - {{name: c, address: {c}, roles: [generator], generators: 1}}
"""


def test_ranks_and_generators_on_three_hosts_outlive_a_cut_and_a_loss(net: Network, tmp_path: Path):
    desk, c = net.hosts["desk"], net.hosts["c"]
    write_config(net, str(tmp_path), RANKS)
    (desk.home / "reward.py").write_text(REWARD)
    (desk.home / "pace.py").write_text(PACE)
    is_slow = tmp_path / "slow"
    is_slow.touch()
    settings = {
        "run.max_steps": 240,
        "learner.num_ranks": 2,
        "data.reward": "reward.py:score",
        "data.reward_kwargs": f"{{is_slow: {is_slow}}}",
    }
    words = (word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
    run = Run(desk, tmp_path / "run", *words)
    run.until_step(3)
    run.until_generators(3)
    assert {"learner-1.log", "learner-host-1.log"} <= {
        file.name for file in (run.folder / "logs").iterdir()
    }
    before = c.processes()
    for name, allowed in LISTENING.items():
        listening = set(re.findall(r":(\d+) ", net.hosts[name].run("ss", "-Hltn")))
        fixed = {port for port in listening if not _is_ephemeral(int(port))}
        assert fixed == allowed, net.hosts[name].run("ss", "-Hltnp")

    c.cut()
    run.until_generators(2)
    time.sleep(2 * LEASE_S)
    c.join()
    run.until_generators(3)
    assert c.processes() == before, "a cut host keeps its processes"

    c.power_off()
    run.until_said("host c: ")
    run.until_generators(2)
    net.start("c")
    run.until_said("host c answers")
    run.until_generators(3)

    # Half of the learner: all of it goes on from the newest checkpoint.
    ranks = [pid for words, pid in net.hosts["b"].processes().items() if "torchrun" in words]
    os.kill(ranks[0], signal.SIGKILL)
    run.until_said("learner: was killed by SIGKILL")
    run.until_said("learner-host-1: was killed by SIGKILL")
    run.until_step(len(run.lines) + 5)

    is_slow.unlink()
    assert run.end() == 0, run.output + run.logs()
    rewards = [line["reward/mean"] for line in run.lines]
    assert len(rewards) == 240
    assert sum(rewards[-30:]) > sum(rewards[:30])
    assert "\nin order\n" in audit(desk, run.folder)
    assert_nothing_is_left(net, "desk", "a", "b", "c")


# Ports beside those that gloo chooses: sshd, the buffer, weights, torchrun's store.
LISTENING = {"a": {"22", "29600", "29601", "29602"}, "b": {"22"}, "c": {"22"}}


def _is_ephemeral(port: int) -> bool:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return first <= port <= last


SEPARATE = """
  - {{name: a, address: {a}, generators: 0}}
  - {{name: b, address: {b}, roles: [generator], generators: 1}}
"""


def assert_strangers_get_nothing(run: Run, stranger: Machine, learner: Machine) -> None:
    """Without keys, or with the public one alone; meanwhile the run makes steps and notices nobody,
    since no message of theirs is read."""
    public = str(run.folder / "keys/server.public")
    for port in (29600, 29601):
        for words in (["plain"], ["guessed", "--server-public", public]):
            url, step = f"tcp://{learner.address}:{port}", len(run.lines)
            script = [sys.executable, f"{ROOT}/tests/benchmarks/stranger.py", url, *words]
            seconds = ["--seconds", "2"]
            tried = json.loads(stranger.run("env", f"PYTHONPATH={ROOT}", *script, *seconds))
            assert tried["messages"] == 0
            assert tried["tries"] > 10
            run.until_step(step + 2)
    refused = ("weights/num_refused_messages", "buffer/refused_malformed")
    assert [run.lines[-1].get(name, 0) for name in refused] == [0, 0]


def test_what_a_stopped_and_a_killed_launcher_leave_behind(net: Network):
    desk, a, b = (net.hosts[name] for name in ("desk", "a", "b"))
    write_config(net, "runs", SEPARATE)
    settings = ("--set", "run.max_steps=100000")
    run = Run(desk, desk.home / "runs/run", *settings)
    run.until_step(2)
    assert_strangers_get_nothing(run, net.hosts["c"], a)
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert "stopped; to continue: streamrl launch runs/run/config.yaml --resume" in run.output
    assert_nothing_is_left(net, "desk", "a", "b")
    # What the hosts wrote is here, what is secret is only where it is needed.
    for file in ("metrics.jsonl", "trained.jsonl", "logs/learner.log", "books.json"):
        assert (run.folder / file).read_text() == (a.home / "runs/run" / file).read_text(), file
    log = run.folder / "logs/generator-0.log"
    assert log.read_text() == (b.home / "runs/run/logs/generator-0.log").read_text() != ""
    keys = {file.name: file.stat().st_mode & 0o777 for file in (b.home / "runs/run/keys").iterdir()}
    assert keys == dict.fromkeys(("client.public", "client.secret", "server.public"), 0o600)
    assert (a.home / "runs/run/keys/server.secret").stat().st_mode & 0o777 == 0o600

    run = Run(desk, run.folder, "--resume", file="runs/run/config.yaml")
    run.until_step(len(run.lines) + 3)
    run.signal(signal.SIGKILL)
    assert run.end() in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert_nothing_is_left(net, "desk", "a", "b")
    assert "\nin order\n" in audit(a, Path("runs/run"))


def test_the_script_for_those_who_have_a_shell_alone(net: Network):
    desk, a, b = (net.hosts[name] for name in ("desk", "a", "b"))
    text = CONFIG.format(folder="runs", model="models/copy").replace("steps: 12", "steps: 100000")
    (desk.home / "run.yaml").write_text(text)
    script = [str(ROOT / "deploy/launch.sh"), "-s", STREAMRL, "-c", "models"]
    metrics = a.home / "streamrl-run/runs/run/metrics.jsonl"
    for number, flags in ((signal.SIGTERM, []), (signal.SIGKILL, ["-r"])):
        step = len(read_metrics(metrics))
        started = subprocess.Popen(
            desk.command(*script, *flags, "run.yaml", a.address, b.address),
            start_new_session=True,
        )
        deadline_s = time.monotonic() + DEADLINE_S
        while len(read_metrics(metrics)) < step + 3:
            assert time.monotonic() < deadline_s
            assert started.poll() is None
            time.sleep(0.1)
        pids = [pid for words, pid in desk.processes().items() if words.startswith("/bin/sh ")]
        os.kill(min(pids), number)
        started.wait(DEADLINE_S)
        assert_nothing_is_left(net, "desk", "a", "b")
    assert {file.name for file in (b.home / "streamrl-run/keys").iterdir()} == {
        *("client.public", "client.secret", "server.public"),
    }
    assert "\nin order\n" in audit(a, Path("streamrl-run/runs/run"))
