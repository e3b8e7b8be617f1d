"""`streamrl launch --ray` on a Ray cluster of several nodes on this machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.cli.launchers.ray.supervisor import MARK
from streamrl.errors import EXIT_CONFIG
from streamrl.service import processes_with
from streamrl.tracking.jsonl import read_metrics
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.system.conftest import CONFIG, STREAMRL, RunFolder

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
cluster_utils = pytest.importorskip("ray.cluster_utils")
job_submission = pytest.importorskip("ray.job_submission")
services = pytest.importorskip("ray._private.services")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
NOTHING_LEFT_S = 120.0
SECRET = "in-no-log-4711"
LEARNER, GENERATOR = {"num_cpus": 2}, {"num_cpus": 1}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """A node of Ray gives up when it has not started within 30 s, as on a machine of many tests."""

    def ask(address: str, node_id: str) -> Any:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                return get_node(address, node_id)
            except RuntimeError as error:
                assert time.monotonic() < deadline_s, "a node of Ray has not started"
                if not is_running(node_id):
                    raise AbortedError from error
            time.sleep(0.2)

    return ask


class AbortedError(Exception):
    """A node's own process has ended before the node was there."""


def is_running(node_id: str) -> bool:
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            # One that has ended and was not waited for has no words.
            if f"--node_id={node_id}" in process.cmdline():
                return True
    return False


def until_started(start: Callable[[], Any]) -> Any:
    """What `start` returns, at the first try or a later one: a node aborts where an agent of it has
    not started within 15 s (`WaitForPersistedPort` in Ray's `src/ray/util/port_persistence.h`)."""
    for _ in range(9):
        with contextlib.suppress(AbortedError):
            return start()
    return start()


def start_head(settings: dict[str, Any]) -> Any:
    """A cluster of its head alone."""
    new = partial(cluster_utils.Cluster, initialize_head=True, head_node_args=settings)
    return until_started(new)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing; a test adds the nodes that it needs."""
    os.environ["PYTHONPATH"] = str(ROOT)
    services.get_node = patient(services.get_node)
    made = start_head({"num_cpus": 0, **NODE})
    yield made
    made.shutdown()


@pytest.fixture
def add(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Adds a node for the time of the test."""
    added: list[Any] = []

    def one(**settings: Any) -> Any:
        added.append(until_started(partial(cluster.add_node, **NODE, **settings)))
        return added[-1]

    yield one
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


class Run(RunFolder):
    """A launch, seen from outside."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        super().__init__(folder / "runs" / name)
        self._output = folder / f"{name}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def files(self) -> Iterator[Path]:
        return self.folder.rglob("*")

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
        name = next((a.partition("=")[2] for a in arguments if a.startswith("run.name=")), "run")
        started.append(Run((*words, *arguments), tmp_path, name))
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


def wait_until_nothing_is_left() -> None:
    deadline_s = time.monotonic() + NOTHING_LEFT_S
    while left := ours():
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def assert_in_order(run: Run) -> None:
    audit = [STREAMRL, "buffer", "audit", str(run.folder)]
    assert "in order" in subprocess.run(audit, capture_output=True, text=True, check=True).stdout


def test_a_run_outlives_its_nodes(add, start, cluster):
    home, first = add(**LEARNER), add(**GENERATOR)
    run = start("--set", "generator.count=1..2", "--set", "run.max_steps=100000")
    run.until_step(2)
    add(**GENERATOR)
    run.until_generators(2)
    cluster.remove_node(first, allow_graceful=False)
    run.until(lambda: "generator-0: its node is lost" in run.output, "a lost node")
    run.until_generators(1)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output
    wait_until_nothing_is_left()
    assert "the books close" in run.output

    run = start("--resume", "--set", "run.max_steps=100000")
    run.until_step(len(run.lines) + 2)
    cluster.remove_node(home, allow_graceful=False)
    run.until(lambda: "goes on from its newest checkpoint" in run.output, "a lost learner")
    add(**LEARNER)
    run.until_step(len(run.lines) + 2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    wait_until_nothing_is_left()
    assert_in_order(run)
    steps = [line["step"] for line in read_metrics(run.folder / "trained.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.fixture
def blind(cluster: Any, tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Starts nodes that see no folder of the driver."""
    hidden = f"mount --make-rprivate / && mount -t tmpfs none {tmp_path}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of mounts here")
    memory = f"--object-store-memory={NODE['object_store_memory']}"
    ray = (Path(STREAMRL).with_name("ray"), "start", "--address", cluster.address, "--block")
    words = " ".join(map(str, (*ray, "--num-cpus=3", memory)))
    started: list[subprocess.Popen[bytes]] = []

    def one() -> "subprocess.Popen[bytes]":
        known = num_nodes(cluster)
        command = ["unshare", "-m", "sh", "-c", f"{hidden} && exec {words}"]
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))
        while num_nodes(cluster) == known:
            if started[-1].poll() is not None:
                raise AbortedError
            time.sleep(0.2)
        return started[-1]

    yield partial(until_started, one)
    for node in started:
        node.terminate()
        node.wait(DEADLINE_S)


def num_nodes(cluster: Any) -> int:
    """Of all that are or were there."""
    return len(cluster.global_state.node_table())


def test_a_node_that_sees_no_folder_of_the_driver_is_sent_what_it_needs(blind, start):
    blind()
    # The model is below the working folder, where it is sent from.
    run = start("--set", "model.path=model")
    assert run.end() == 0, run.output
    assert "the books close" in run.output
    assert_in_order(run)
    assert any((run.folder / "checkpoints" / "step-00000012").iterdir())
    assert "serves model" in run.log("generator-0")


def checkpoints_in(mirror: Path) -> set[str]:
    """The complete ones of the run."""
    return {path.parent.name for path in mirror.glob("run/checkpoints/step-*/manifest.json")}


def test_without_shared_storage_a_lost_learner_and_resume_go_on_from_the_mirror(
    blind, start, tmp_path_factory
):
    mirror = tmp_path_factory.mktemp("mirror")
    settings = ("--set", "model.path=model", "--set", f"run.folder_mirror=file://{mirror}")
    first = blind()
    run = start(*settings, "--set", "run.max_steps=100000")
    run.until_step(5)
    first.terminate()
    run.until(lambda: "goes on from its newest checkpoint" in run.output, "a lost learner")
    blind()
    # What the driver had of the first learner is mirrored before the second one starts.
    run.until(lambda: run.log("learner").count("attached at version") == 2, "another learner")
    known = checkpoints_in(mirror)
    run.until(lambda: bool(checkpoints_in(mirror) - known), "a checkpoint of the new learner")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output
    assert f"file://{mirror}/run has the run's folder" in run.output
    done = len(run.lines)
    assert f"step-{done:08}" in checkpoints_in(mirror), run.output + run.log("learner")[-4000:]
    # On another machine, and another node.
    shutil.rmtree(run.folder)
    run = start(*settings, "--resume", "--set", f"run.max_steps={done + 4}")
    assert run.end() == 0, run.output
    assert f"fetching the run at step {done} from" in run.output
    assert "the books close" in run.output
    assert_in_order(run)
    steps = [line["step"] for line in read_metrics(run.folder / "trained.jsonl")]
    assert steps == list(range(1, done + 5))
    kept = {path.name for path in (run.folder / "checkpoints").glob("step-*")}
    assert kept == checkpoints_in(mirror)
    assert len(kept) == 2


def test_a_buffer_in_redis_outlives_the_learners_node(add, start, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMRL_REDIS_PASSWORD", "word")
    host = cluster.address.rpartition(":")[0]
    server = RedisServer(tmp_path / "redis", f"bind 127.0.0.1 {host}", "requirepass word")
    server.start()
    url = f"redis://{host}:{server.port}/0"
    try:
        home, _ = add(**LEARNER), add(**GENERATOR)
        run = start("--set", f"buffer.url={url}", "--set", "run.max_steps=100000")
        run.until_step(4)
        cluster.remove_node(home, allow_graceful=False)
        run.until(lambda: "goes on from its newest checkpoint" in run.output, "a lost learner")
        add(**LEARNER)
        run.until_step(len(run.lines) + 4)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.output
        wait_until_nothing_is_left()
        assert "the books close" in run.output
        audit = [STREAMRL, "buffer", "audit", str(run.folder)]
        assert (
            "in order" in subprocess.run(audit, capture_output=True, text=True, check=True).stdout
        )
        again = ("--new", "--set", f"buffer.url={url}")
        run = start(*again)
        assert run.end() == 0, run.output
    finally:
        server.kill()


def submitted(client: Any, **job: Any) -> str:
    """Waits for the agents of a head that has just been started."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError:
            assert time.monotonic() < deadline_s, "no agent of Ray takes a job"
        time.sleep(0.5)


def test_a_job_of_ray_drains_when_it_is_stopped(model, tmp_path):
    """A cluster of one node: nodes of one machine take each other's working folders away."""
    text = CONFIG.format(folder=tmp_path / "runs", model=model)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "run.yaml").write_text(text)
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    head = {"num_cpus": 4, **NODE, **ports, "include_dashboard": True}
    made = start_head(head)
    try:
        client = job_submission.JobSubmissionClient(f"http://127.0.0.1:{head['dashboard_port']}")
        job = submitted(
            client,
            entrypoint=f"{STREAMRL} launch run.yaml --no-view --ray --set run.max_steps=100000",
            runtime_env={
                "working_dir": str(tmp_path / "job"),
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"},
            },
        )
        lines = tmp_path / "runs" / "run" / "metrics.jsonl"
        deadline_s = time.monotonic() + DEADLINE_S
        while not lines.exists() or len(read_metrics(lines)) < 2:
            assert time.monotonic() < deadline_s, client.get_job_logs(job)
            time.sleep(0.2)
        client.stop_job(job)
        while not client.get_job_status(job).is_terminal():
            assert time.monotonic() < deadline_s, client.get_job_logs(job)
            time.sleep(0.2)
        output = client.get_job_logs(job)
    finally:
        made.shutdown()
    assert "the books close" in output
    assert "finishing the step and saving it; a second signal stops now" in output
    assert "stopped; to continue: streamrl launch" in output


def test_two_runs_share_a_cluster_and_no_log_has_their_secrets(add, start, cluster, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    add(num_cpus=6, num_gpus=2)
    runs = [start("--set", f"run.name=run-{i}", "--set", "generator.device=cpu") for i in range(2)]
    assert [run.end() for run in runs] == [0, 0], [run.output for run in runs]
    assert all("the books close" in run.output for run in runs)
    logs = [*Path(cluster.head_node.get_session_dir_path()).glob("logs/**/*"), *runs[0].files()]
    assert len(logs) > 20
    assert not [path for path in logs if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--set", "learner.num_ranks=4", "--set", "cluster.start_s=1"),
            "learner needs 2 CPUs of one node, and the largest has 0 CPUs, after 1 s",
        ),
        (("--ray", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1 can be used: start one"),
    ],
)
def test_what_cannot_start_says_why(start, arguments, sentence):
    run = start(*arguments)
    assert run.end() == EXIT_CONFIG, run.output
    assert sentence in run.output


# A package that stands before the one of this tree.
OTHER = f"__path__ = [{str(ROOT / 'streamrl')!r}]\n__version__ = '0.0.1'\n"
NONE = "raise ModuleNotFoundError(\"No module named 'streamrl'\")\n"


@pytest.mark.parametrize(
    ("package", "sentence"),
    [(OTHER, "has StreamRL 0.0.1, and this machine"), (NONE, "has no StreamRL")],
)
def test_a_node_with_another_release_is_refused(add, start, tmp_path, package, sentence):
    (tmp_path / "before" / "streamrl").mkdir(parents=True)
    (tmp_path / "before" / "streamrl" / "__init__.py").write_text(package)
    add(**LEARNER, env_vars={"PYTHONPATH": f"{tmp_path / 'before'}:{ROOT}"})
    run = start()
    assert run.end() == EXIT_CONFIG, run.output
    assert sentence in run.output


def test_a_port_that_is_taken_is_named(add, start):
    add(**LEARNER)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = start("--set", f"buffer.url=zmq://127.0.0.1:{port}")
        assert run.end() == EXIT_CONFIG, run.output
    assert f"buffer.url: port {port} of node" in run.output
