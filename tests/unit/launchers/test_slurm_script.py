"""The batch script of a run, and what is refused before anything is started."""

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.cli.launchers import slurm
from streamrl.cli.launchers.slurm import step_command
from streamrl.cli.main import main
from streamrl.cli.processes.run_commands import sole_launch
from streamrl.placement.plan import Host
from tests.documents import ROOT

CONFIG = """
run: {{name: run, folder: {folder}}}
model: {{path: m}}
data: {{source: addition}}
"""
SCRIPT = ROOT / "deploy" / "slurm" / "run.sbatch"
HOST = Host("n1", "10.0.0.1", num_cores=2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path / "runs"))
    return str(path)


@pytest.mark.parametrize("given", ["", "--resume", "--new"])
@pytest.mark.parametrize("restarts", ["", "0", "1"])
def test_a_job_starts_as_it_was_submitted_and_goes_on_after_that(given, restarts):
    """The script itself, with `streamrl` replaced by echo. The start before a restart may have
    ended without a step."""
    environment = {**os.environ, "STREAMRL": "echo"}
    if restarts:
        environment["SLURM_RESTART_COUNT"] = restarts
    words = ["run.yaml", *given.split(), "--set", "run.name=a b"]
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, env=environment
    )
    choice = "run.yaml --set run.name=a b --resume" if restarts == "1" else " ".join(words)
    assert (done.stdout, done.stderr) == (f"launch {choice} --slurm --no-view\n", "")


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("", "--slurm: this is no job of Slurm; submit one with `sbatch deploy/slurm/run.sbatch"),
        ("17", "--slurm: there is no `scontrol` here"),
    ],
)
def test_what_is_no_job_is_refused(capsys, file, tmp_path, monkeypatch, job, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    assert main(["launch", file, "--slurm"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["--slurm", "--ray"])
def test_limits_of_parity_are_for_one_machine(capsys, file, launcher):
    assert main(["launch", file, launcher, "--set", "parity.max_gap=0.1"]) == 2
    assert "parity: is compared on one machine" in capsys.readouterr().err


def test_a_step_gets_its_variables_on_its_node(tmp_path):
    """The command after `srun`'s options is what a node runs: it is run here."""
    log = tmp_path / "learner.log"
    command = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; echo failed >&2; exit 3")
    words = step_command("learner", "n2", command, {"CUDA_VISIBLE_DEVICES": "2,3"}, log)
    assert words[0] == "srun"
    assert "--nodelist=n2" in words
    done = subprocess.run(words[words.index("sh") :], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
    assert log.read_text() == "2,3\nfailed\n"


def test_a_step_keeps_the_interface_and_threads_that_the_job_has(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    planned = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    words = step_command("learner", "n2", ("env",), planned, tmp_path / "learner.log")
    subprocess.run(words[words.index("sh") :], check=True)
    lines = (tmp_path / "learner.log").read_text().splitlines()
    assert {"NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=eth0"} <= {*lines}


def test_a_run_that_another_launch_has_is_left_as_it_is(capsys, file, tmp_path, monkeypatch):
    """Before its first step."""
    monkeypatch.setattr("streamrl.cli.launchers.slurm._LOST_LOCK_S", 0.0)
    monkeypatch.setattr("streamrl.cli.launchers.slurm.hosts_of_job", lambda: (HOST,))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    journal = tmp_path / "runs" / "run" / "buffer" / "journal.sqlite"
    journal.parent.mkdir(parents=True)
    journal.touch()
    with sole_launch(tmp_path / "runs" / "run"):
        assert main(["launch", file, "--slurm"]) == 2
    assert "is a launch of" in capsys.readouterr().err
    assert journal.exists()


def test_an_allocation_gets_keys_and_steps_that_can_be_pasted(capsys, file, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    hosts = (HOST, Host("n2", "10.0.0.2", num_cores=2))
    monkeypatch.setattr("streamrl.cli.launchers.slurm.hosts_of_job", lambda: hosts)
    assert main(["launch", file, "--slurm", "--dry-run"]) == 0
    steps = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert steps
    assert all(words[words.index("-c") + 1].endswith('>>"$log" 2>&1') for words in steps)


def test_a_launch_in_a_pod_for_torchrun_is_no_rank(file, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    assert main(["launch", file, "--dry-run"]) == 0
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()


def test_who_shares_the_folder_of_runs_shares_its_locks(tmp_path):
    tmp_path.chmod(0o2770)
    with sole_launch(tmp_path / "run"):
        assert (tmp_path / ".launches").stat().st_mode & 0o7777 == 0o2770


def test_the_lock_of_a_node_that_is_gone_is_waited_for(tmp_path, capsys, monkeypatch):
    is_held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with sole_launch(tmp_path / "run"):
            is_held.set()
            ends.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(120)
    # It ends once it is waited for.
    monkeypatch.setattr("streamrl.cli.processes.run_commands.time.sleep", lambda _: ends.set())
    with sole_launch(tmp_path / "run", wait_s=60.0):
        holder.join()
    assert "waiting for its lock, 60 s at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "17"),
        # Slurm gives the last task of an array the id of the array, which stands for every task.
        ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "17_3"),
        ({"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}, "17"),
    ],
)
def test_a_job_whose_time_ends_while_it_waits_for_the_lock_is_requeued(
    file, tmp_path, monkeypatch, variables, name
):
    requeued: list[Sequence[str]] = []
    job = "streamrl.cli.launchers.slurm"
    monkeypatch.setattr(f"{job}.hosts_of_job", lambda: (HOST,))
    monkeypatch.setattr(f"{job}.subprocess.run", lambda words, **_: requeued.append(words))
    monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    monkeypatch.setattr(
        "streamrl.cli.processes.run_commands.time.sleep",
        lambda _: os.kill(os.getpid(), signal.SIGUSR1),
    )
    for variable, value in {"SLURM_JOB_ID": "17", **variables}.items():
        monkeypatch.setenv(variable, value)
    with sole_launch(tmp_path / "runs" / "run"):
        assert main(["launch", file, "--slurm"]) == 0
    assert requeued == [["scontrol", "requeue", name]]


@pytest.mark.parametrize(
    ("nodes", "own", "address"),
    [
        ("n1 n2", "127.0.1.1", "127.0.0.1"),
        ("n1", "127.0.1.1", "127.0.1.1"),
        ("n1 n2", "::2", "::2"),
    ],
)
def test_a_node_that_knows_itself_by_loopback_says_what_the_others_reach(
    capsys, tmp_path, monkeypatch, nodes, own, address
):
    """The other node is one that this machine has a route to."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n[ $2 = hostnames ] && echo {nodes} || echo NodeAddr=$4\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr("socket.gethostbyname", {"n1": own, "n2": "127.0.0.2"}.__getitem__)
    slurm.main()
    assert json.loads(capsys.readouterr().out)["address"] == address
