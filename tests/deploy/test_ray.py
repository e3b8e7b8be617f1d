"""`streamrl launch --ray` on a Ray cluster of several nodes on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.process_environment import processes_with
from tests.system.conftest import CONFIG, STREAMRL, Launched

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


@pytest.fixture
def start(cluster: Any, tmp_path: Path, model: Path) -> Iterator[Callable[..., Launched]]:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    started: list[Launched] = []

    def one(*arguments: str) -> Launched:
        process = subprocess.Popen(
            [STREAMRL, "launch", str(config), "--no-view", "--ray", cluster.address, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=tmp_path,
        )
        started.append(Launched(process, tmp_path / "run"))
        return started[-1]

    yield one
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.communicate()


def test_three_nodes_train_to_the_end(add, start):
    for size in (LEARNER, GENERATOR, GENERATOR):
        add(**size)
    run = start("--set", "generator.count=2")
    assert run.end() == 0, run.output
    print(run.output)
