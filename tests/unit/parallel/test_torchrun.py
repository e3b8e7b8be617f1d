"""`streamrl torchrun` ends as the rank that failed, and hands on its sentence."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from learners.executor.place import join
from streamrl.cli.arguments.commands import parse
from streamrl.cli.processes.torchrun import main
from streamrl.config.learner import LearnerSettings
from streamrl.errors import (
    ERROR_FILE_VARIABLE,
    PARENT_VARIABLE,
    ConfigError,
    DivergedError,
    ErrorPipe,
    StreamRLError,
    TransportError,
)

RANK = """
import os, sys, time
from streamrl import errors
from streamrl.errors import leave_record
rank = int(os.environ["RANK"])
names = sys.argv[1].split(",")
if names[rank] == "killed later":
    assert leave_record(errors.ConfigError("of the first start"))
    names[rank] = "silent" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "killed"
if names[rank] == "killed":
    os.kill(os.getpid(), 9)
if names[rank] == "silent":
    sys.exit(7)
if names[rank] == "hung up":
    os.kill(os.getppid(), 1)
    time.sleep(0.5)
elif names[rank] != "well":
    error = getattr(errors, names[rank])(f"rank {rank} has failed")
    assert leave_record(error)
    sys.exit(errors.exit_code_of(error))
"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """torchrun's handlers stay when it has ended, and are not those that later tests rely on."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(tmp_path: Path, *ranks: str, restarts: int = 0) -> int:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = (sys.executable, str(script), ",".join(ranks))
    own = ("--standalone", f"--nproc-per-node={len(ranks)}", f"--max-restarts={restarts}")
    return main(arguments(*own, "--no-python", *command))


def arguments(*words: str) -> argparse.Namespace:
    return parse(["torchrun", *words])


@pytest.mark.parametrize(
    ("ranks", "kind", "sentence"),
    [
        (["ConfigError"], ConfigError, "rank 0 has failed"),
        (["well", "DivergedError"], DivergedError, "rank 1 has failed"),
        (["TransportError"], TransportError, "rank 0 has failed"),
        (["silent"], StreamRLError, "rank 0 of the learner ended with exit code 7"),
        (["killed"], StreamRLError, "rank 0 of the learner ended with exit code -9"),
    ],
)
def test_it_ends_as_the_rank_that_failed(tmp_path, ranks: Sequence[str], kind, sentence):
    with pytest.raises(kind, match=sentence):
        run(tmp_path, *ranks)


def test_what_an_earlier_start_said_is_not_why_the_last_one_failed(tmp_path):
    with pytest.raises(StreamRLError, match="rank 0 of the learner ended with exit code -9"):
        run(tmp_path, "killed later", restarts=1)


def test_it_ends_well_and_leaves_the_environment_to_its_own_parent(tmp_path, monkeypatch):
    with ErrorPipe() as pipe:
        for name, value in pipe.environment.items():
            monkeypatch.setenv(name, value)
        assert run(tmp_path, "well", "well") == 0
        assert {name: os.environ[name] for name in pipe.environment} == pipe.environment
    monkeypatch.delenv(ERROR_FILE_VARIABLE)
    monkeypatch.delenv(PARENT_VARIABLE)
    assert run(tmp_path, "well") == 0
    assert {ERROR_FILE_VARIABLE, PARENT_VARIABLE}.isdisjoint(os.environ)


def test_options_of_the_ranks_are_not_taken_for_its_own():
    words = ["--nnodes=2", "--no-python", "streamrl", "learner", "--config", "x", "--", "--help"]
    assert arguments(*words).words == ["--", *words]


def test_another_number_of_ranks_than_torchrun_has_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence = r"num_ranks 3 is for a learner that is started without torchrun, .* started 2"
    with pytest.raises(ConfigError, match=sentence):
        join(LearnerSettings(num_ranks=3))


def test_nohup_holds_for_ranks(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(tmp_path, "hung up") == 0
