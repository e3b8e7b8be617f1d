"""`streamrl launch --ray` on a Ray cluster of several nodes on this machine."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.launchers.ray.supervisor import MARK
from streamrl.process_environment import processes_with
from streamrl.tracking.jsonl import read_metrics
from tests.system.conftest import CONFIG, STREAMRL, RunFolder

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
cluster_utils = pytest.importorskip("ray.cluster_utils")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
LEARNER, GENERATOR = {"num_cpus": 2}, {"num_cpus": 1}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing; a test adds the nodes that it needs."""
    os.environ["PYTHONPATH"] = str(ROOT)
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
    yield made
    made.shutdown()


@pytest.fixture
def add(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Adds a node for the time of the test."""
    added: list[Any] = []

    def one(**settings: Any) -> Any:
        added.append(cluster.add_node(**NODE, **settings))
        return added[-1]

    yield one
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


class Run(RunFolder):
    """A launch, seen from outside."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        super().__init__(folder / "runs" / "run")
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            is_late = time.monotonic() > deadline_s or self.process.poll() is not None
            assert not is_late or condition(), f"{what}: {self.output}{self.log('learner')[-2000:]}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.lines) >= step, f"step {step}")

    def until_generators(self, count: int) -> None:
        self.until(
            lambda: [line["generator/count"] for line in self.lines[-1:]] == [count],
            f"{count} generators",
        )

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def start(cluster: Any, tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs of the small task, which has a reward of the user's beside its configuration."""
    text = CONFIG.format(folder="runs", model=model)
    (tmp_path / "run.yaml").write_text(text.replace("data:\n", "data:\n  reward: slow.py:score\n"))
    (tmp_path / "slow.py").write_text(REWARD)
    started: list[Run] = []

    def one(*arguments: str) -> Run:
        words = (STREAMRL, "launch", "run.yaml", "--no-view", "--ray", cluster.address)
        started.append(Run((*words, *arguments), tmp_path))
        return started[-1]

    yield one
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


REWARD = """
import time

def score(episodes):
    time.sleep(0.1)
    return [float(episode.response == episode.prompt.answer) for episode in episodes]
"""


def ours() -> list[int]:
    """Processes of runs on any node."""
    return processes_with(MARK, lambda _: True)


def test_generators_come_and_go_and_sigterm_drains(add, start, cluster, tmp_path):
    add(**LEARNER)
    first = add(**GENERATOR)
    run = start("--set", "generator.count=1..2", "--set", "run.max_steps=100000")
    run.until_step(2)
    print("first", time.strftime("%X"))
    add(**GENERATOR)
    run.until_generators(2)
    print("second", time.strftime("%X"))
    cluster.remove_node(first, allow_graceful=False)
    run.until(lambda: "its node is lost" in run.output, "loss")
    print("lost", time.strftime("%X"))
    run.until_generators(1)
    steps = len(run.lines)
    run.until_step(steps + 3)
    add(**GENERATOR)
    run.until_generators(2)
    print("back", time.strftime("%X"))
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output
    print("end", time.strftime("%X"))
    print(run.output)
    assert not ours()
    assert "the books close" in run.output
    audit = subprocess.run([STREAMRL, "buffer", "audit", str(run.folder)], capture_output=True, text=True)
    print(audit.stdout, audit.stderr)
    assert audit.returncode == 0, audit
    trained = [line["step"] for line in read_metrics(run.folder / "trained.jsonl")]
    assert trained == list(range(1, len(trained) + 1))


def test_a_lost_learner_goes_on_from_its_checkpoint_and_a_killed_driver_leaves_nothing(add, start, cluster):
    home = add(**LEARNER)
    add(**GENERATOR)
    run = start("--set", "run.max_steps=100000")
    run.until_step(4)
    print("first", time.strftime("%X"))
    cluster.remove_node(home, allow_graceful=False)
    run.until(lambda: "goes on from its newest checkpoint" in run.output, "loss")
    print("lost", time.strftime("%X"))
    add(**LEARNER)
    steps = len(run.lines)
    run.until_step(steps + 3)
    print("back", time.strftime("%X"))
    print(run.output)
    os.kill(run.process.pid, signal.SIGKILL)
    t=time.time()
    run.process.wait()
    deadline_s = time.monotonic() + 30
    while ours():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    print("gone", time.time()-t)
