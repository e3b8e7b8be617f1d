"""`streamrl status --probe`: what the health check of a container finds of each daemon."""

import json
import socket
import time
from pathlib import Path

import msgspec
import pytest

from streamrl.cli.main import main
from streamrl.cli.status import _of_generator
from streamrl.config import to_yaml
from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S
from streamrl.types import LearnerActivity, LearnerStatus, SchedulingState
from tests.contract.limits_config import limits_config
from tests.contract.test_buffer_limits import SHARED, serving
from tests.contract.test_generators_command import ask, stats
from tests.ports import free_port
from tests.records import make_status


def write_config(url: str, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(to_yaml(limits_config(url)))
    return str(path)


@pytest.mark.parametrize("backend", SHARED)
def test_buffer_and_generator_are_asked(backend: str, tmp_path: Path, capsys):
    own = f"generator-{socket.gethostname()}"
    with serving(backend, tmp_path) as url:
        config = write_config(url, tmp_path)
        assert main(["status", config, "--probe", "buffer"]) == 0
        assert capsys.readouterr().out == "healthy\n"
        probe = ["status", config, "--probe", "generator", "--id", "generator-{host}"]
        assert main(probe) == 1
        assert capsys.readouterr().out == f"{own} does not report to the buffer\n"
        ask(url, lambda buffer: buffer.heartbeat(make_status(own)))
        assert main(probe) == 0
        assert main(["status", config, "--probe", "generator"]) == 2
        assert "--id: is required for a generator" in capsys.readouterr().err


def test_a_buffer_that_is_not_there_is_not_healthy(tmp_path: Path, capsys):
    config = write_config(f"zmq://127.0.0.1:{free_port()}", tmp_path)
    for role in ("buffer", "generator"):
        assert main(["status", config, "--probe", role, "--id", "a"]) == 1
        assert "the buffer is not running" in capsys.readouterr().out


def test_a_learner_is_healthy_as_long_as_it_reports(tmp_path: Path, capsys):
    url = f"zmq://127.0.0.1:{free_port()}"
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(limits_config(url)))
    assert main(["status", str(run), "--probe", "learner"]) == 1
    assert "no learner has reported in" in capsys.readouterr().out
    for age_s, code, sentence in ((0, 0, "healthy"), (3600, 1, "last reported 36")):
        report = LearnerStatus(
            policy_version=1,
            learner_term=1,
            activity=LearnerActivity.WAITING,
            activity_s=3600.0,
            time_s=time.time() - age_s,
        )
        (run / "learner.json").write_text(json.dumps(msgspec.to_builtins(report, str_keys=True)))
        assert main(["status", str(run), "--probe", "learner"]) == code
        assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("scheduling", [{}, {"g": SchedulingState.CORDONED}])
def test_a_generator_that_stopped_reporting_is_not_healthy(scheduling):
    for age_s, sentence in ((0.0, ""), (HEARTBEAT_TIMEOUT_S + 1, "g is silent")):
        known = {"generators": (make_status("g"),), "heartbeat_ages_s": (age_s,)}
        assert _of_generator(stats(**known, scheduling_states=scheduling), "g") == sentence
