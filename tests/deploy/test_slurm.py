"""deploy/slurm/run.sbatch on a real Slurm of three virtual nodes: the run survives a killed step,
a time limit and a failed node, and nothing of it is left behind."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.checkpoints.find import list_checkpoints, version_of
from tests.deploy.slurm_cluster import SlurmCluster, missing
from tests.documents import ROOT
from tests.system.conftest import CONFIG, STREAMRL, RunFolder
from tests.system.test_launch import assert_audit_passes, assert_every_step_once

DEADLINE_S = 300.0
MAX_STEPS = 100_000
SCRIPT = ROOT / "deploy" / "slurm" / "run.sbatch"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), num_nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Job(RunFolder):
    """A run in the queue; its folder is on every node."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        super().__init__(folder / "run")
        self._cluster = cluster
        text = CONFIG.format(folder=folder, model=folder / "model")
        # Through the network, although the nodes' /dev/shm is one.
        text = text.replace("weights: {", "weights: {backend: gloo, ")
        text = text.replace("count: 1", "count: 2").replace(
            "max_steps: 12", f"max_steps: {MAX_STEPS}"
        )
        (folder / "run.yaml").write_text(text)
        self._output = folder / "job.log"
        options = (f"--output={self._output}", "--nodes=3", f"--export=ALL,STREAMRL={STREAMRL}")
        said = cluster.run("sbatch", *options, str(SCRIPT), str(folder / "run.yaml"))
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found, said
        self.id = found.group(1)

    @property
    def state(self) -> str:
        shown = self._cluster.run("scontrol", "show", "--oneliner", "job", self.id)
        return " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", shown)[:2])

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition; unblocked by it or the deadline."""
        give_up = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up, (self.state, self.output, self.log("learner"))
            time.sleep(0.2)

    def until_left(self) -> None:
        """Every node is free, with nothing of the job on it."""
        self.until(lambda: self._cluster.run("squeue", "--noheader") == "")

    def signal(self, name: str, step: str) -> None:
        """Of a step by its process's name. scancel may report a fault where there is none."""
        steps = self._cluster.run("squeue", "--noheader", "--steps", "-o", "%i %j")
        (found,) = (line.split()[0] for line in steps.splitlines() if line.split()[1] == step)
        self._cluster.run("scancel", f"--signal={name}", found, check=False)

    def signal_batch(self, name: str) -> None:
        """The launcher; scancel may report a fault here too."""
        self._cluster.run("scancel", "--batch", f"--signal={name}", self.id, check=False)


def test_a_job_survives_a_killed_step_a_time_limit_and_a_failed_node(
    cluster: SlurmCluster, tmp_path: Path
):
    job = Job(cluster, tmp_path)
    job.until_step(5)
    assert job.state.startswith("RUNNING")
    assert _daemons(cluster, "n1") == ["buffer", "learner"]
    assert (_daemons(cluster, "n2"), _daemons(cluster, "n3")) == (["generator"], ["generator"])
    secret = job.folder / "keys" / "server.secret"
    assert (secret.stat().st_mode & 0o777, secret.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    job.signal("KILL", "generator-0")
    job.until(lambda: "generator-0: was killed by SIGKILL" in job.output)
    job.until(lambda: _daemons(cluster, "n2") == ["generator"])

    # What Slurm does before the time limit, as the job asked for it.
    before = len(job.lines)
    job.signal_batch("USR1")
    job.until(lambda: job.state.startswith("PENDING"))
    assert f"job {job.id} goes on when it is its turn again" in job.output
    saved = version_of(list_checkpoints(job.folder)[-1])
    assert saved >= before
    # Slurm takes a start in the second of the requeue for one of the job that was revoked.
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+5")
    job.until_step(saved + 5)
    assert f"at version {saved}" in job.log("learner")

    cluster.kill_node("n3")
    job.until(lambda: "generator-1: its node n3 has failed; the run goes on without" in job.output)
    job.until_step(max(len(job.lines), 150) + 10)
    job.signal_batch("INT")
    job.until_left()

    assert job.state == "FAILED 130:0", job.output
    assert_every_step_once(job, version_of(list_checkpoints(job.folder)[-1]))
    assert_audit_passes(job)
    rewards = [line["reward/mean"] for line in job.lines]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.1, rewards
    assert all(_daemons(cluster, node) == [] for node in ("n1", "n2", "n3"))


def _daemons(cluster: SlurmCluster, node: str) -> list[str]:
    """The roles of the daemons that run on the node; srun, of the launcher, is none."""
    commands = [_words(process) for process in cluster.processes(node)]
    python = [words for words in commands if len(words) > 2 and words[1] == STREAMRL]
    return sorted(words[2] for words in python if words[2] != "launch")


def _words(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
