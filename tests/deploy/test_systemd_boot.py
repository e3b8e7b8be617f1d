"""The units of deploy/systemd under a systemd that is the first process of its container: installed
by the commands of docs/multi-node.md, killed, started again, stopped, audited."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from streamrl.tracking.jsonl import read_metrics
from tests.deploy.docker_engine import IMAGE, Engine, running_engine
from tests.documents import ROOT

DEADLINE_S = 180.0
MACHINE = "streamrl-test-systemd"
STREAMRL = "/opt/streamrl/bin/streamrl"
UNITS = ("streamrl-buffer", "streamrl-learner", "streamrl-generator@0")
SETTINGS = {
    "run": {"name": "booted", "folder": "runs", "max_steps": 100_000},
    "model": {"path": "model"},
    "data": {"source": "copy", "source_kwargs": {"min_length": 2, "max_length": 4}},
    "buffer": {"url": "zmq://127.0.0.1:29610", "curve": "/etc/streamrl/keys", "lease_ttl_s": 5},
    "weights": {"address": "tcp://127.0.0.1:29611"},
    "learner": {"groups_per_step": 8, "checkpoint": {"every": 20}},
}


class Machine:
    """A container with systemd; its working folder of the units is `folder` outside."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self.run = folder / "runs" / "booted"

    def __call__(self, *command: str, check: bool = True) -> str:
        """Standard output of a command there, run by root."""
        done = subprocess.run(
            ["/usr/bin/docker", "exec", "--user", "root", MACHINE, *command],
            env=self._engine.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-4000:]}"
        return done.stdout

    def shows(self, unit: str, name: str) -> str:
        return self("systemctl", "show", "--value", f"--property={name}", unit).strip()

    @property
    def num_steps(self) -> int:
        return len(read_metrics(self.run / "metrics.jsonl"))

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for it, until the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self("journalctl", "--no-pager", "--lines=100")
            time.sleep(0.2)

    def until_more_steps(self, count: int) -> None:
        step = self.num_steps
        self.until(lambda: self.num_steps >= step + count)


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running_engine(tmp_path_factory.mktemp("engine")) as engine:
        state = tmp_path_factory.mktemp("state")
        for path in (state, *list(state.parents)[:2]):
            path.chmod(0o755)
        _boot(engine, state)
        try:
            yield Machine(engine, state)
        finally:
            engine.docker("rm", "--force", "--volumes", MACHINE)


# A tree of control groups that systemd may write; what a machine lends a container differs.
BOOT = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec /sbin/init"


def _boot(engine: Engine, state: Path) -> None:
    tmpfs = [word for path in ("/run", "/run/lock") for word in ("--tmpfs", path)]
    unconfined = [f"--security-opt={name}=unconfined" for name in ("seccomp", "apparmor")]
    engine.docker(
        *("run", "--detach", "--name", MACHINE, "--hostname", "host", "--network", "none"),
        *("--cap-add", "SYS_ADMIN", "--cgroupns", "private", *unconfined, "--no-healthcheck"),
        *("--shm-size", "1g", *tmpfs, "--volume", f"{state}:/var/lib/streamrl"),
        *("--user", "root", "--workdir", "/", "--env", "container=docker"),
        *("--stop-signal", "SIGRTMIN+3", "--entrypoint", "sh", f"{IMAGE}:cpu", "-c", BOOT),
    )
    engine.docker("cp", ROOT / "deploy" / "systemd", f"{MACHINE}:/root/systemd")


def _configure(machine: Machine) -> None:
    """What the units expect, as the page lists it."""
    tree = yaml.safe_load((ROOT / "deploy" / "configs" / "cpu.yaml").read_text())
    tree = {name: {**tree.get(name, {}), **SETTINGS.get(name, {})} for name in tree}
    tree["model"]["recipe"]["alphabet"] = "0123456789c="
    machine("mkdir", "-p", "/etc/streamrl")
    machine("sh", "-c", f"cat > /etc/streamrl/run.yaml <<'END'\n{yaml.safe_dump(tree)}\nEND")
    machine("chown", "streamrl:streamrl", "/var/lib/streamrl")
    machine(STREAMRL, "keys", "new", "/etc/streamrl/keys")
    machine("chown", "-R", "streamrl:streamrl", "/etc/streamrl/keys")
    _as_the_user(machine, "get-model", "--config", "/etc/streamrl/run.yaml")


def _as_the_user(machine: Machine, *words: str) -> str:
    within = ("setpriv", "--reuid=streamrl", "--regid=streamrl", "--clear-groups")
    change = ("sh", "-c", 'cd /var/lib/streamrl && exec "$@"', "sh")
    return machine(*within, *change, STREAMRL, *words)


def _kill_and_wait(machine: Machine, units: Sequence[str]) -> None:
    """Each unit's first process dies, is started again once, and the run goes on."""
    for unit in units:
        machine("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit)
        machine.until(lambda unit=unit: machine.shows(unit, "NRestarts") == "1")
        machine.until_more_steps(5)


def test_units_start_again_what_was_killed_and_stop_in_order(machine: Machine):
    # The image's other units are no concern of this test.
    machine("systemctl", "is-system-running", "--wait", check=False)
    _configure(machine)
    machine("sh", "-c", "cp /root/systemd/*.service /etc/systemd/system/")
    machine("systemctl", "daemon-reload")
    machine("systemctl", "enable", "--now", "streamrl-buffer", "streamrl-learner")
    machine("systemctl", "enable", "--now", "streamrl-generator@0")
    machine.until(lambda: machine.num_steps >= 5)
    _kill_and_wait(machine, UNITS)
    machine("systemctl", "stop", "streamrl-generator@*", "streamrl-learner", "streamrl-buffer")
    ended = {unit: machine.shows(unit, "Result") for unit in UNITS}
    assert ended == dict.fromkeys(UNITS, "success"), machine("journalctl", "--lines=60")
    assert _as_the_user(machine, "buffer", "audit", "runs/booted").strip().endswith("in order")

    # A configuration that is refused is not tried again.
    machine("sed", "-i", "s/group_size: 8/group_size: 0/", "/etc/streamrl/run.yaml")
    machine("systemctl", "start", "streamrl-generator@0", check=False)
    machine.until(lambda: machine.shows("streamrl-generator@0", "ActiveState") == "failed")
    assert machine.shows("streamrl-generator@0", "ExecMainStatus") == "2"
    assert machine.shows("streamrl-generator@0", "NRestarts") == "0"
    # The journal has a line some time after the unit has written it.
    machine("journalctl", "--sync")
    assert "generator.group_size" in machine("journalctl", "--unit=streamrl-generator@0")
