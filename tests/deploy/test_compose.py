"""`deploy/compose.yaml` on a real engine: trains, loses containers, drains, and is audited.

The commands are those of docs/containers.md, by `docker compose` 2; by docker-compose 1 where 2
cannot be had.
"""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.tracking.jsonl import read_metrics
from tests.deploy.compose_program import docker_settings
from tests.deploy.docker_engine import (
    CACHE,
    DOCKER,
    IMAGE,
    REDIS,
    Engine,
    mirror,
    running_engine,
    timed,
)
from tests.documents import ROOT, commands

DEADLINE_S = 240.0
PAGE = "docs/containers.md"
PROJECT = "streamrl-test"
# Faster than the shipped task on two busy cores, and without an end of its own.
SMALLER: dict[str, dict[str, Any]] = {
    "run": {"max_steps": 100_000},
    "model": {"path": "/runs/models/copy"},
    "data": {"source": "copy", "source_kwargs": {"min_length": 2, "max_length": 4}},
    "generator": {"max_new_tokens": 6, "max_num_seqs": 64},
    "buffer": {"lease_ttl_s": 5},
    "learner": {
        "groups_per_step": 16,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 20},
    },
}


class Project:
    """The containers of compose.yaml; a run's folder is read in its volume."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.runs = engine.data / "volumes" / f"{PROJECT}_runs" / "_data"
        folder.chmod(0o755)
        self.folder = folder
        settings = docker_settings(CACHE / "docker-settings", mirror())
        self.programs = {"1": ["docker-compose"]}
        if settings is not None:
            self.programs = {"2": [DOCKER, "compose"], **self.programs}
        self.environment = {
            **engine.environment,
            **({"DOCKER_CONFIG": str(settings)} if settings else {}),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "STREAMRL_IMAGE": IMAGE,
            "STREAMRL_REDIS_IMAGE": REDIS,
            "STREAMRL_CONFIGS": str(folder),
            "STREAMRL_SHM_SIZE": "1g",
        }

    @property
    def program(self) -> list[str]:
        return next(iter(self.programs.values()))

    def configure(self, name: str) -> None:
        """The shipped configuration, smaller, for a run of this name."""
        tree = yaml.safe_load((ROOT / "deploy" / "configs" / "cpu.yaml").read_text())
        merged = {
            section: {**tree.get(section, {}), **SMALLER.get(section, {})} for section in tree
        }
        merged["run"]["name"] = name
        merged["model"]["recipe"]["alphabet"] = "0123456789c="
        (self.folder / "cpu.yaml").write_text(yaml.safe_dump(merged))

    def __call__(self, command: str, *, expected: int = 0, **environment: str) -> str:
        """What `docker compose ...` prints; images are there already, and a terminal is not."""
        program, plugin, *words = shlex.split(command)
        assert (program, plugin) == ("docker", "compose")
        words = [{"--build": "--no-build"}.get(word, word) for word in words]
        words = [
            part
            for word in words
            for part in ((word, "-T") if word in ("exec", "run") else (word,))
        ]
        done = subprocess.run(
            [*self.program, *words],
            cwd=ROOT / "deploy",
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == expected, done.stdout[-4000:]
        return done.stdout

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Those of the service, by number."""
        label = f"label=com.docker.compose.service={service}"
        ids = self.engine.docker("ps", "--all", "--quiet", "--filter", label).split()
        found = json.loads(self.engine.docker("inspect", *ids)) if ids else []
        return sorted(found, key=lambda one: one["Name"])

    def state(self, service: str) -> dict[str, Any]:
        (container,) = self.containers(service)
        return {**container["State"], "RestartCount": container["RestartCount"]}

    def log(self, service: str) -> str:
        return "".join(
            path.read_text(errors="replace")
            for one in self.containers(service)
            for path in [Path(one["LogPath"])]
        )

    def crash(self, service: str) -> None:
        """Kills the first process of the container, as the kernel does where memory is short."""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def lines(self, run: str) -> list[dict[str, Any]]:
        return read_metrics(self.runs / run / "metrics.jsonl")

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for it, until the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.log("learner")[-4000:]
            time.sleep(0.2)

    def until_more_steps(self, run: str, count: int) -> None:
        """Beyond those made so far, by a learner that lives."""
        step = len(self.lines(run))
        self.until(lambda: len(self.lines(run)) >= step + count)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with running_engine(tmp_path_factory.mktemp("engine")) as engine:
        made = Project(engine, tmp_path_factory.mktemp("configs"))
        made.configure("quickstart")
        remove = "docker compose --profile cpu --profile redis down --volumes --timeout 1"
        made(remove)
        try:
            yield made
        finally:
            made(remove)
            assert not engine.docker("ps", "--all", "--quiet")
            assert PROJECT not in engine.docker("volume", "ls") + engine.docker("network", "ls")


def documented(part: str) -> str:
    """The command of the page that has this part."""
    (command,) = [command for command in commands(PAGE) if part in command]
    return command


def rise(lines: list[dict[str, Any]]) -> float:
    rewards = [line["reward/mean"] for line in lines]
    return sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10


def test_compose_takes_every_combination_of_profiles(project):
    profiles = ("cpu", "gpu", "zmq", "redis")
    for count in range(1, len(profiles) + 1):
        for some in itertools.combinations(profiles, count):
            for file in ((), ("--env-file", "redis.env")):
                words = [*file, *(word for name in some for word in ("--profile", name))]
                done = subprocess.run(
                    [*project.program, *words, "config", "--quiet"],
                    cwd=ROOT / "deploy",
                    env=project.environment,
                    capture_output=True,
                    text=True,
                )
                assert (done.returncode, done.stderr) == (0, ""), words


@pytest.mark.parametrize("version", ["2", "1"])
def test_keys_reach_every_daemon_by_a_file_and_replace_no_setting(project, version, tmp_path):
    if version not in project.programs:
        pytest.skip("docker compose 2 cannot be had here")
    file = tmp_path / "environment"
    file.write_text("JUDGE_KEY=a key\nSTREAMRL__BUFFER__URL=zmq://elsewhere:1\n")
    profiles = ("--profile", "cpu", "--profile", "gpu")
    done = subprocess.run(
        [*project.programs[version], *profiles, "config"],
        cwd=ROOT / "deploy",
        env={**project.environment, "STREAMRL_ENV_FILE": str(file)},
        capture_output=True,
        text=True,
        check=True,
    )
    services = yaml.safe_load(done.stdout)["services"]
    daemons = [
        one["environment"] for one in services.values() if one.get("restart") == "on-failure"
    ]
    assert len(daemons) == 5
    assert {one["JUDGE_KEY"] for one in daemons} == {"a key"}
    assert {one["STREAMRL__BUFFER__URL"] for one in daemons} == {"zmq://buffer:29610"}


def test_the_buffers_image_has_no_torch_and_no_image_runs_as_root(project):
    for target, code in (("buffer", 1), ("cpu", 0)):
        image = ("run", "--rm", "--network", "none", "--entrypoint", "python3", f"{IMAGE}:{target}")
        find = "import importlib.util as u, os; print(bool(u.find_spec('torch')), os.getuid())"
        assert project.engine.docker(*image, "-c", find).split() == [str(not code), "10001"]
        size = int(project.engine.docker("inspect", "-f", "{{.Size}}", f"{IMAGE}:{target}"))
        print(f"{target}: {size / 1e6:.0f} MB")


def test_a_run_without_a_gpu_survives_its_containers_and_drains(project):
    with timed("up until the first step"):
        project(documented("up -d --build"))
        project.until(lambda: project.lines("quickstart"))
    first = len(project.lines("quickstart"))
    with timed("a killed generator"):
        project.engine.docker("kill", project.containers("generator")[0]["Id"])
        project("docker compose --profile cpu up -d --no-build")
        project.until_more_steps("quickstart", first + 5)
    with timed("a crashed buffer"):
        project.crash("buffer")
        project.until(lambda: project.state("buffer")["RestartCount"] == 1)
        project.until_more_steps("quickstart", 5)
    with timed("a killed buffer"):
        project.engine.docker("kill", project.containers("buffer")[0]["Id"])
        project("docker compose --profile cpu up -d --no-build")
        project.until_more_steps("quickstart", 5)
    with timed("three generators"):
        project(documented("--scale generator=3"))
        project.until(lambda: project.lines("quickstart")[-1]["generator/count"] == 3)
    with timed("until the reward has risen"):
        project.until(lambda: rise(project.lines("quickstart")) > 0.2)
    lines = project.lines("quickstart")
    print(f"{len(lines)} steps, reward +{rise(lines):.2f}")
    assert "step" in project(documented("exec learner streamrl status"))
    routes = set(re.findall(r"gets its weights by ([\w ]+)", project.log("learner")))
    # A file is for one that joins late.
    assert routes - {"file"} == {"shared memory"}
    names = {f"generator-{one['Config']['Hostname']}" for one in project.containers("generator")}
    assert len(names) == 3
    # One that the machine does not let run for some seconds is not in the line.
    assert all(any(f"generator/{name}/tokens_per_s" in line for line in lines) for name in names)
    for role in ("learner", "buffer", "generator"):
        project.until(
            lambda role=role: project.containers(role)[0]["State"]["Health"]["Status"] == "healthy"
        )
    with timed("stop"):
        project(documented("cpu stop"))
    ended = [one for role in ("learner", "buffer", "generator") for one in project.containers(role)]
    assert [one["State"]["ExitCode"] for one in ended] == [0] * 5
    audit = project(documented("cpu run --rm"))
    assert audit.strip().endswith("in order"), audit
    assert not project.runs.joinpath("quickstart", "abandoned").exists()


def test_what_another_start_would_not_help_is_left_alone_and_a_missing_peer_is_not(project):
    refused = "docker compose --profile cpu run --rm --no-deps -e STREAMRL__GENERATOR__GROUP_SIZE=0"
    assert "generator.group_size: was 0" in project(f"{refused} generator")
    alone = "docker compose --profile cpu run --rm --no-deps -e STREAMRL__BUFFER__DEADLINE_S=1"
    alone += " -e STREAMRL__BUFFER__URL=redis://nobody:1/0 -e STREAMRL_REDIS_PASSWORD=any"
    alone += " buffer buffer books --require-none --config /etc/streamrl/cpu.yaml"
    assert "nobody:1" in project(alone, expected=5)


def test_a_run_on_redis_survives_its_server(project, tmp_path):
    project.configure("redis")
    for command in (documented("mkdir"), documented("urandom")):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    password = tmp_path / "secrets" / "redis-password"
    run = {"STREAMRL_REDIS_PASSWORD_FILE": str(password)}
    with timed("redis: up until the first step"):
        project(documented("redis.env up"), **run)
        project.until(lambda: project.lines("redis"))
    assert "serving at zmq://" in project.log("buffer")
    (redis,) = project.containers("redis")
    assert not any(redis["NetworkSettings"]["Ports"].values())
    project.until_more_steps("redis", 5)
    with timed("redis: a crashed server"):
        project.crash("redis")
        project.until(lambda: project.state("redis")["RestartCount"] == 1)
        project.until_more_steps("redis", 10)
    secret = password.read_text().strip()
    assert secret not in project.log("learner") + project.log("redis") + project.log("buffer")
    assert secret not in (project.runs / "redis" / "config.yaml").read_text()
    project(documented("redis.env stop"), **run)
    assert project.state("learner")["ExitCode"] == 0
    audit = documented("redis.env run").replace("quickstart", "redis")
    assert project(audit, **run).strip().endswith("in order")
