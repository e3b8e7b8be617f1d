"""The batch script of a run, and what is refused before anything is submitted."""

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.cli.launchers.slurm.steps import step_command
from streamrl.cli.main import main
from streamrl.cli.processes.sole_launch import sole_launch
from streamrl.config import load_config
from streamrl.placement.plan import Host

CONFIG = """
run: {{name: run, folder: {folder}}}
model: {{path: m}}
data: {{source: addition}}
"""
HOST = Host("n1", "10.0.0.1", num_cores=2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path / "runs"))
    return str(path)


def script(capsys: pytest.CaptureFixture[str], file: str, *words: str) -> str:
    assert main(["launch", file, "--slurm", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_the_script_asks_for_nodes_a_signal_and_another_start(capsys, file, tmp_path):
    text = script(capsys, file, "--nodes", "4", "--sbatch", "partition=gpu", "--sbatch", "qos=low")
    wanted = ("nodes=4", "requeue", "no-kill", "signal=B:USR1@120", "partition=gpu", "qos=low")
    assert all(f"#SBATCH --{option}\n" in text for option in wanted)
    assert f"#SBATCH --output={tmp_path}/runs/run/logs/slurm.log\n" in text
    # The user's options come last, and the last one wins.
    assert text.index("nodes=4") < text.index("partition=gpu")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert not (tmp_path / "runs").exists()


def test_another_job_of_the_run_leaves_a_pending_one_its_configuration(capsys, file, monkeypatch):
    monkeypatch.setattr("streamrl.cli.launchers.slurm.launch._sbatch", lambda _: "submitted")
    for lr in ("1e-5", "2e-5", "1e-5"):
        words = ["--set", f"learner.optimizer.lr={lr}"]
        text = script(capsys, file, *words)
        assert main(["launch", file, "--slurm", *words]) == 0
        (word,) = (word for word in text.split() if word.endswith(".yaml"))
        assert load_config(word, environment={}).config.learner.optimizer.lr == float(lr)
    assert len(list(Path(word).parent.glob("config-*.yaml"))) == 2


@pytest.mark.parametrize("submitted", ["", "--resume", "--new"])
def test_a_job_starts_as_it_was_submitted_and_goes_on_after_that(capsys, file, tmp_path, submitted):
    """The script itself, with `streamrl` replaced by echo."""
    text = script(capsys, file, *submitted.split())
    shown = text.replace(text.split("exec ")[1].split()[0], "echo")

    def option(restart_count: str | None = None) -> str:
        started = {} if restart_count is None else {"SLURM_RESTART_COUNT": restart_count}
        environment = {**os.environ, **started}
        done = subprocess.run(
            ["bash"], input=shown, text=True, capture_output=True, env=environment
        )
        launched, path, *options = done.stdout.split()
        assert launched == "launch"
        assert Path(path).match(f"{run}/slurm/config-*.yaml")
        assert options[:2] == ["--slurm", "--no-view"]
        return " ".join(options[2:])

    run = tmp_path / "runs" / "run"
    assert option() == option("0") == submitted
    # The start before it may have ended without a step, and a buffer server knows the run then.
    assert option("1") == "--resume"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    assert option() == "--resume"


def test_the_run_ends_with_its_first_node_where_no_failure_is_allowed(capsys, file):
    text = script(capsys, file, "--set", "cluster.on_host_failure=stop")
    assert "--no-kill" not in text


@pytest.mark.parametrize(
    ("words", "job", "sentence"),
    [
        (("--sbatch=--partition=gpu",), "", "--sbatch: was '--partition=gpu'; give sbatch's"),
        (("--nodes", "2"), "17", "--nodes: this is job 17, whose nodes are used as they are"),
        ((), "", "--slurm: there is no `sbatch` here"),
        ((), "17", "--slurm: there is no `scontrol` here"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    capsys, file, tmp_path, monkeypatch, words, job, sentence
):
    monkeypatch.setenv("PATH", str(tmp_path))
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    assert main(["launch", file, "--slurm", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--nodes", "4"), ("--sbatch", "partition=gpu")])
def test_options_of_a_job_without_slurm_start_nothing_here(capsys, file, words):
    assert main(["launch", file, *words]) == 2
    said = f"{words[0]}: is an option of --slurm, which was not given"
    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize("job", ["", "17"])
def test_a_run_that_another_launch_has_is_left_as_it_is(capsys, file, tmp_path, monkeypatch, job):
    """Submitted again, or in an allocation, before its first step."""
    monkeypatch.setattr("streamrl.cli.launchers.slurm.job._LOST_LOCK_S", 0.0)
    monkeypatch.setattr("streamrl.cli.launchers.slurm.job.hosts_of_job", lambda: (HOST,))
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
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
    monkeypatch.setattr("streamrl.cli.launchers.slurm.job.hosts_of_job", lambda: hosts)
    assert main(["launch", file, "--slurm", "--dry-run"]) == 0
    steps = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert steps
    assert all(words[words.index("-c") + 1].endswith('>>"$log" 2>&1') for words in steps)


def test_the_lock_of_a_node_that_is_gone_is_waited_for(tmp_path, capsys):
    is_held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with sole_launch(tmp_path / "run"):
            is_held.set()
            ends.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    threading.Timer(0.2, ends.set).start()
    with sole_launch(tmp_path / "run", wait_s=60.0):
        holder.join()
    assert "waiting for its lock, 60 s at most" in capsys.readouterr().err


def test_a_job_whose_time_ends_while_it_waits_for_the_lock_is_requeued(file, tmp_path, monkeypatch):
    requeued: list[Sequence[str]] = []
    job = "streamrl.cli.launchers.slurm.job"
    monkeypatch.setattr(f"{job}.hosts_of_job", lambda: (HOST,))
    monkeypatch.setattr(f"{job}.subprocess.run", lambda words, **_: requeued.append(words))
    monkeypatch.setattr("streamrl.cli.launch.require_startable", lambda _: None)
    monkeypatch.setattr(
        "streamrl.cli.processes.sole_launch.time.sleep",
        lambda _: os.kill(os.getpid(), signal.SIGUSR1),
    )
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with sole_launch(tmp_path / "runs" / "run"):
        assert main(["launch", file, "--slurm"]) == 0
    assert requeued == [["scontrol", "requeue", "17"]]
