"""The files of deploy/ agree with each other, with the command line and with the exit codes.

Images are built and containers run in `tests/deploy/test_compose.py`; what is for GPUs is checked
here alone.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.cli.arguments.commands import parse
from streamrl.config import RunConfig, load_config
from streamrl.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_FENCED,
    EXIT_ROLLOUTS,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
IN_CONTAINER = "/etc/streamrl/"

SPEC = importlib.util.spec_from_file_location("requirements", DEPLOY / "requirements.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)


def compose(**variables: str) -> dict[str, Any]:
    """compose.yaml, as docker compose reads it in this environment."""
    text = (DEPLOY / "compose.yaml").read_text()
    replaced = VARIABLE.sub(lambda found: variables.get(found[1], found[2]), text)
    assert "${" not in replaced
    tree: dict[str, Any] = yaml.safe_load(replaced.replace("$$", "$"))
    return tree


SERVICES: Mapping[str, Mapping[str, Any]] = compose()["services"]
DAEMONS = [name for name, one in SERVICES.items() if one.get("restart") == "on-failure"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours, with the service or the target of the Dockerfile that has it."""
    for name, service in SERVICES.items():
        if name not in ("keys", "redis"):
            yield name, service["command"]
        test = service.get("healthcheck", {}).get("test", ["CMD-SHELL"])
        if test[0] == "CMD":
            assert test[1] == "streamrl"
            yield f"health of {name}", test[2:]
    for kind, words in re.findall(r"^(?:    )?(CMD) (\[.*\])$", DOCKERFILE, re.MULTILINE):
        listed = yaml.safe_load(words)
        yield kind, listed[1:] if listed[0] == "streamrl" else listed


@pytest.mark.parametrize(("name", "words"), [*commands()])
def test_every_command_is_one_of_the_command_line(name, words):
    if words == ["--help"]:
        return
    parsed = parse(words)
    given = getattr(parsed, "config", None) or parsed.target
    assert given.startswith(IN_CONTAINER)


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml"])
def test_every_service_takes_the_configuration_that_is_named(name):
    services = compose(STREAMRL_CONFIG=name)["services"]
    for daemon in DAEMONS:
        assert f"{IN_CONTAINER}{name}" in services[daemon]["command"]
        assert f"{IN_CONTAINER}{name}" in services[daemon]["healthcheck"]["test"]


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml"])
@pytest.mark.parametrize("variables", ["", "redis.env"])
def test_daemons_find_each_other_by_the_names_of_services(name, variables):
    environment = dict(_variables(variables)) if variables else {}
    services = compose(**environment)["services"]
    names = {*services, *services["learner"]["networks"]["run"]["aliases"]}
    for daemon in DAEMONS:
        config = load_config(DEPLOY / "configs" / name, environment=services[daemon]["environment"])
        assert _host(config.config.buffer.url) in names
        assert _host(config.config.weights.address) == "learner"
        _require_mounted(config.config, services[daemon])


def _require_mounted(config: RunConfig, service: Mapping[str, Any]) -> None:
    targets = {v["target"] if isinstance(v, dict) else v.split(":")[1] for v in service["volumes"]}
    assert {str(config.run.folder), str(config.buffer.curve)} <= targets
    assert str(config.buffer.password_file) == f"/run/secrets/{service['secrets'][0]}"


def _host(url: str) -> str:
    return url.partition("://")[2].partition(":")[0]


def _variables(name: str) -> Iterator[tuple[str, str]]:
    for line in (DEPLOY / name).read_text().splitlines():
        if not line.startswith("#"):
            variable, _, value = line.partition("=")
            yield variable, value


def test_the_variables_of_redis_are_those_of_compose():
    known = {found[0] for found in VARIABLE.findall((DEPLOY / "compose.yaml").read_text())}
    assert {name for name, _ in _variables("redis.env")} - {"COMPOSE_PROFILES"} <= known
    profiles = {profile for service in SERVICES.values() for profile in service["profiles"]}
    assert profiles == {"cpu", "gpu", "zmq", "redis"}
    assert set(dict(_variables("redis.env"))["COMPOSE_PROFILES"].split(",")) <= profiles


@pytest.mark.parametrize("daemon", DAEMONS)
def test_docker_starts_a_daemon_again_unless_that_would_not_help(daemon):
    entrypoint = SERVICES[daemon]["entrypoint"]
    assert (entrypoint[0], entrypoint[-2:]) == ("tini", ["--", "streamrl"])
    left_alone = {int(word) for word in entrypoint if word.isdigit()}
    assert left_alone == {EXIT_CONFIG, EXIT_FENCED, EXIT_ROLLOUTS, EXIT_DIVERGED}


def test_learner_and_generators_share_memory_and_only_generators_lack_the_servers_key():
    for name in DAEMONS:
        volumes = SERVICES[name]["volumes"]
        memory = [v["target"] for v in volumes if isinstance(v, dict) and v["source"] == "memory"]
        assert memory == ([] if name == "buffer" else ["/dev/shm"])
        keys = [v.split(":")[0] for v in volumes if isinstance(v, str) and ":/keys" in v]
        assert keys == (["client-keys"] if "generator" in name else ["keys"])


def test_every_target_is_in_the_dockerfile_and_no_service_publishes_a_port():
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for name, service in SERVICES.items():
        assert "ports" not in service
        if name != "redis":
            assert service["build"]["target"] in targets
            build = service["build"]
            engine = "".join(f"-{one}" for one in build.get("args", {}).values())
            assert service["image"].endswith(f":{build['target']}{engine}")
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    images = {name for name in targets - {"python", "wheel"} if not name.startswith("engine-")}
    assert users == ["10001:10001"] * len(images)


def test_the_context_of_a_build_has_what_is_copied_and_mounted():
    kept = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {f"!{source}" for source in (*wheel["packages"], *wheel["force-include"])} <= set(kept)
    for source in re.findall(r"type=bind,source=([\w./-]+)", DOCKERFILE):
        assert f"!{source}" in kept
        assert (DEPLOY.parent / source).exists()
    for line in kept:
        if line.startswith("!"):
            assert (DEPLOY.parent / line[1:]).exists(), line


WITHOUT = re.search(r"--without ([\w,-]+)", DOCKERFILE)
NEEDS_NO_TORCH = """
import importlib, sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
for name in {modules}:
    importlib.import_module(name)
"""


def test_the_buffers_image_has_all_that_its_commands_import():
    assert WITHOUT is not None
    without = WITHOUT[1].split(",")
    assert "torch" in without
    names = {name.replace("-", "_") for name in without}
    modules = ["buffers.daemon", "buffers.redis.client"]
    modules += [f"streamrl.cli.{name}" for name in ("status", "new")]
    modules += [f"streamrl.cli.buffer.{name}" for name in ("running", "audit")]
    modules += ["streamrl.cli.samples", "streamrl.cli.buffer.running"]
    code = NEEDS_NO_TORCH.format(names=names, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_requirements_are_those_of_the_package_and_of_the_extras_but_for_some():
    everything = made.requirements(["redis"], [])
    assert {"torch", "redis", "pyzmq"} <= {made.name_of(line) for line in everything}
    fewer = made.requirements(["redis"], ["torch"])
    assert set(everything) - set(fewer) == {line for line in everything if "torch" in line}


@pytest.mark.parametrize(
    ("extras", "without", "sentence"),
    [
        (["reddis"], [], "no extra of pyproject.toml: reddis; there are vllm, sglang, redis"),
        ([], ["torhc"], "no requirement of pyproject.toml: torhc"),
    ],
)
def test_a_misspelled_name_is_an_error(extras, without, sentence):
    with pytest.raises(SystemExit, match=sentence):
        made.requirements(extras, without)


STOP_S = RunConfig.model_fields["run"].default.stop_s
SECONDS = {"m": 60.0, "min": 60.0, "s": 1.0, "": 1.0}


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([a-z]*)", text).groups()
    return float(number) * SECONDS[unit]


def test_a_container_is_given_longer_than_its_daemon_takes_to_end():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    daemons = {name: s for name, s in services.items() if "stop_grace_period" in s}
    assert {"buffer", "learner", "generator"} <= {name.partition("-")[0] for name in daemons}
    for service in daemons.values():
        stop_s = float(service.get("environment", {}).get("STREAMRL__RUN__STOP_S", STOP_S))
        assert seconds(service["stop_grace_period"]) > stop_s


def test_a_unit_is_given_longer_than_its_daemon_takes_to_end():
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    assert len(units) == 3
    for unit in units:
        text = unit.read_text()
        found = re.search("^Environment=STREAMRL__RUN__STOP_S=(.+)$", text, re.MULTILINE)
        (grace,) = re.findall("^TimeoutStopSec=(.+)$", text, re.MULTILINE)
        assert seconds(grace) > (float(found[1]) if found else STOP_S)


def test_paths_with_spaces_reach_the_first_machine_of_several(tmp_path):
    """With what stands in for ssh, Ray and the launcher: a shell in the home of a machine. The list
    of machines has the line ends of Windows."""
    desk, home, programs = (tmp_path / name for name in ("desk", "home", "programs"))
    for folder in (desk / "my data", home, programs):
        folder.mkdir(parents=True)
    scripts = {
        "ssh": f'while [ $# -gt 2 ]; do shift; done; cd {home}; HOME={home} exec sh -c "$2"',
        "ray": '[ "$1" = health-check ] || exec sleep 60',
        "streamrl": 'printf "%s\\n" "$@" >words; find . -name "*.jsonl" >found',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\nexport SSH_CONNECTION='a 1 b 2'\n{script}\n")
        (programs / name).chmod(0o755)
    for name, text in {"hosts": "b\r\n", "my run.yaml": "", "my data/a b.jsonl": "{}"}.items():
        (desk / name).write_text(text)
    words = ["-c", "my data", "hosts", "my run.yaml", "--set", "run.name=it's"]
    path, folder = f"{programs}:{os.environ['PATH']}", home / "my run"
    environment = {**os.environ, "PATH": path, "STREAMRL_FOLDER": folder.name}
    subprocess.run([DEPLOY / "multi_node.sh", *words], cwd=desk, env=environment, check=True)
    assert (folder / "found").read_text() == "./my data/a b.jsonl\n"
    told = ["launch", "my run.yaml", "--set", "run.name=it's", "--ray", "b:6379"]
    assert (folder / "words").read_text().splitlines() == told
