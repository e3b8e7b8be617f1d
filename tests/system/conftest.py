"""Real daemons on the CPU: one warm-started model for all, a run folder for each."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.cli.main import main
from streamrl.config import RunConfig
from streamrl.metrics import OWN, find
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import read_last, read_metrics
from tests.waiting import block_until

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
ROOT = Path(__file__).parents[2]
# Far beyond what anything takes: a machine of many tenants is slow, and a hang is a hang.
DEADLINE_S = 420.0
# What is promised of a process that is told to end, and what such a machine adds to it.
STOP_S = RunConfig.model_fields["run"].default.stop_s + 30.0

CONFIG = """
run: {{name: run, folder: {folder}, max_steps: 12, evaluate: false}}
model:
  path: {model}
  recipe:
    hidden_size: 32
    intermediate_size: 64
    num_layers: 1
    num_heads: 2
    alphabet: "0123456789c="
    warm_start_steps: 100
    warm_start_accuracy: 0.25
    lr: 3e-3
data:
  source: copy
  source_kwargs: {{min_length: 2, max_length: 3}}
  max_prompt_length: 8
  num_eval_prompts: 32
generator:
  count: 1
  group_size: 4
  max_new_tokens: 6
  max_num_seqs: 16
  num_threads: 1
  drain_s: 2
buffer: {{url: "zmq://127.0.0.1:0", max_staleness: 2, lease_ttl_s: 3}}
learner:
  groups_per_step: 4
  max_tokens_per_micro_batch: 512
  num_threads: 1
  optimizer: {{lr: 1e-3}}
  checkpoint: {{every: 3}}
weights: {{address: "tcp://127.0.0.1:0", deadline_s: 8}}
"""


def script(name: str) -> list[str]:
    """The words that run this script of `tests/research`, in any folder."""
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", f"tests.research.{name}"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, in this process, which has imported torch."""
    folder = tmp_path_factory.mktemp("model")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, model=folder / "model"))
    assert main(["get-model", "--config", str(config)]) == 0
    return folder / "model"


SLOW = """
import time

def score(episodes):
    time.sleep({seconds})
    return [1.0 for _ in episodes]
"""


def slow_reward(folder: Path, seconds: float) -> str:
    """`data.reward` that takes this long: a run that waits leaves the cores to what starts."""
    file = folder / "slow.py"
    file.write_text(SLOW.format(seconds=seconds))
    return f"{file}:score"


HELD = """
import itertools, pathlib, time

groups = itertools.count(1)

def score(episodes):
    number = next(groups)
    while number > int(pathlib.Path({file!r}).read_text() or 0):
        time.sleep(0.05)
    return [float(e.response.strip() == e.prompt.answer) for e in episodes]
"""


def held_reward(folder: Path, num_groups: int) -> str:
    """`data.reward` under which a process scores so many groups and waits with the others, so that
    the run does not end, however slow the test is, until `allow_groups` says more."""
    file = folder / "held.py"
    file.write_text(HELD.format(file=str(folder / "allowed")))
    allow_groups(folder, num_groups)
    return f"{file}:score"


def allow_groups(folder: Path, num_groups: int) -> None:
    (folder / "allowed").write_text(str(num_groups))


class RunFolder:
    """What a run has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl; no run of these tests has metrics of its own beside the catalogue's."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        names = {name for line in lines for name in line} - {"step"}
        assert not [name for name in names if find(name) is OWN]
        return lines

    @property
    def newest(self) -> dict[str, Any]:
        """The last of the lines, for who asks many times a second."""
        return read_last(self.folder / "metrics.jsonl")

    @property
    def books(self) -> dict[str, Any]:
        return read_json(self.folder / "books.json")

    def log(self, role: str) -> str:
        path = self.folder / "logs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; unblocked by it or the deadline."""
        block_until(condition, DEADLINE_S, explain=lambda: self.log("learner"))

    def until_step(self, step: int) -> None:
        self.until(lambda: self.newest.get("step", 0) >= step)

    def until_generators(self, count: int) -> None:
        """So many report, as of the newest step."""
        self.until(lambda: self.newest.get("generator/count") == count)


@dataclass
class Launched(RunFolder):
    """A `streamrl launch` under way, seen from outside."""

    process: "subprocess.Popen[str]"
    folder: Path
    output: str = ""

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; unblocked by it, by the launch's end, or the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.log("learner")
            assert self.process.poll() is None, self.finish_output()
            time.sleep(0.02)

    def child(self, role: str) -> psutil.Process:
        """The newest process of the role."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if role in words and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        raise AssertionError(f"no {role} is running")

    def kill(self, role: str) -> None:
        """What it has written is all that it will."""
        process = self.child(role)
        process.kill()
        process.wait()

    def finish_output(self) -> str:
        self.output += self.process.communicate(timeout=DEADLINE_S)[0]
        return self.output

    def end(self) -> int:
        """Waits for the launch to end by itself; its exit code."""
        self.finish_output()
        return self.process.returncode


@pytest.fixture
def launch(tmp_path: Path, model: Path) -> Iterator[Callable[..., Launched]]:
    """Starts runs of the small task; whatever is left of them is killed in the end.

    No daemon is started again, but where the test ends one on purpose, which says `strict=False`.
    """
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    started: list[Launched] = []

    def start(*arguments: str, file: Path = config, strict: bool = True) -> Launched:
        options = ["--no-view", *(["--strict"] if strict else [])]
        process = subprocess.Popen(
            [STREAMRL, "launch", str(file), *options, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(Launched(process, tmp_path / "run"))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            for child in psutil.Process(run.process.pid).children(recursive=True):
                child.kill()
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.communicate()
