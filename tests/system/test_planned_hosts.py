"""A plan over two hosts, both of them loopback addresses: its commands make the whole run."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.cli.keys import main as make_keys
from streamrl.config import load_config, to_yaml
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Host, Plan, PlannedProcess
from streamrl.tracking.jsonl import read_metrics
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S

HOSTS = (Host("a", "127.0.0.1", num_cores=1), Host("b", "127.0.0.2", num_cores=1))


@pytest.fixture
def plan(tmp_path: Path, model: Path) -> Plan:
    make_keys(argparse.Namespace(folder=str(tmp_path / "keys")))
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, model=model))
    port = f"cluster.first_port={free_port(3)}"
    settings = (port, "learner.num_ranks=2", "generator.count=2", "run.max_steps=3")
    config = load_config(file, [f"buffer.curve={tmp_path / 'keys'}", *settings]).config
    return make_plan(config, HOSTS)


@pytest.fixture
def started(plan: Plan, tmp_path: Path) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Every process of the plan, as it stands there."""
    plan.config.run.path.mkdir(parents=True)
    plan.config_file.write_text(to_yaml(plan.config))
    running = {p.name: _start(p, tmp_path / f"{p.name}.log") for p in plan.processes}
    yield running
    for process in running.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(process: PlannedProcess, log: Path) -> "subprocess.Popen[bytes]":
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(programs / process.command[0]), *process.command[1:]],
            env={**os.environ, **process.environment, "PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@pytest.mark.long
def test_the_commands_of_a_plan_over_two_hosts_make_one_run(plan: Plan, started, tmp_path: Path):
    assert [(p.name, p.host) for p in plan.processes if p.role == "learner"] == [
        ("learner", "a"),
        ("learner-host-1", "b"),
    ]
    for name in ("learner", "learner-host-1"):
        assert started[name].wait(DEADLINE_S) == 0, (tmp_path / f"{name}.log").read_text()
    metrics = read_metrics(plan.config.run.path / "metrics.jsonl")
    assert [line["step"] for line in metrics][-1] == 3
