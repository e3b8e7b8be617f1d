"""`streamrl.train`: the daemons of a launch from a script, and what is known of the run there."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import streamrl
from streamrl import api
from streamrl.errors import ConfigError, TransportError
from tests.documents import write_files
from tests.system.conftest import DEADLINE_S

CONFIG: dict[str, Any] = {
    "run": {"name": "from_python", "max_steps": 2, "evaluate": False},
    "data": {"max_prompt_length": 8, "shuffle": False},
    "generator": {"group_size": 2, "max_new_tokens": 4, "num_threads": 1},
    "buffer": {"url": "zmq://127.0.0.1:0"},
    "learner": {"groups_per_step": 2, "num_threads": 1, "optimizer": {"warmup_steps": 0}},
    "weights": {"address": "tcp://127.0.0.1:0"},
}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {**CONFIG, "model": {"path": str(model)}}


@pytest.mark.long
def test_a_run_with_a_local_reward_and_rows_of_ones_own(config, capsys):
    bonus = 0.25

    def length(episode):
        return bonus + episode.num_response_tokens

    run = streamrl.train(config, reward=length, dataset=iter(ROWS), wait=False, strict=True)
    followed = [row["step"] for row in run.follow()]
    assert run.wait(DEADLINE_S).exit_code == 0
    rows = run.metrics()
    assert followed == [row["step"] for row in rows] == [1, 2]
    assert all(row["reward/mean"] > 1 and row["reward/mean"] % 0.25 == 0 for row in rows)
    assert run.checkpoint == run.path / "checkpoints" / "step-00000002"
    assert "the books close" in run.output
    assert run.output in capsys.readouterr().out
    again = streamrl.train(
        {**config, "run": {**config["run"], "max_steps": 3}},
        reward=length,
        dataset=ROWS,
        resume=True,
        strict=True,
        show=False,
    )
    assert [row["step"] for row in again.metrics()] == [1, 2, 3]
    written = [file.suffix for file in Path("runs/inputs").iterdir()]
    assert all(file.stat().st_mode & 0o077 == 0 for file in Path("runs/inputs").glob("*.yaml"))
    assert (written.count(".jsonl"), written.count(".yaml")) == (1, 2)

    def held(episode):
        threading.Event().wait()

    # Stopped before its first step, it has nothing of the run that it replaces.
    new = streamrl.train(config, reward=held, dataset=ROWS, new=True, wait=False, show=False)
    assert (new.metrics(), new.checkpoint, new.evaluation) == ([], None, {})
    new.stop(DEADLINE_S)
    assert new.metrics() == []


def test_what_is_wrong_is_raised_as_the_command_line_says_it(config, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(ConfigError, match=r"reward: was int; it must be a function or PATH"):
        streamrl.train(config, reward=3, dataset=ROWS)
    with pytest.raises(ConfigError, match=r"dataset: row 1 was str; it must be a mapping"):
        streamrl.train(config, dataset=[ROWS[0], "a"])
    with pytest.raises(ConfigError, match=r"run\.max_steps"):
        streamrl.train(config, dataset=ROWS, settings={"run.max_steps": -1})
    for bad, sentence in ((Path("x"), r"run\.max_steps: was 'x'"), (object(), "settings: what is")):
        with pytest.raises(ConfigError, match=sentence):
            streamrl.train(config, dataset=ROWS, settings={"run.max_steps": bad})
    for bad, sentence in ((Path("x"), r"run\.max_steps: was 'x'"), (object(), "config: holds")):
        with pytest.raises(ConfigError, match=sentence):
            streamrl.train({**config, "run": {"max_steps": bad}}, dataset=ROWS)
    before = os.listdir("/proc/self/fd")
    run = streamrl.train(config, dataset=ROWS, reward="exact_mtach", show=False, wait=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"launch: .*data\.reward.*exact_match"):
            run.wait()
    # What others have left may be collected meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("has_output", [True, False])
def test_a_run_goes_on_where_its_lines_cannot_be_shown(config, tmp_path, monkeypatch, has_output):
    """Its standard output is closed, or none; the launch prints more than a pipe holds, and no
    UTF-8."""
    launch = tmp_path / "launch"
    launch.write_text("#!/bin/sh\nyes aaa | head -c 200000; printf '\\377\\n'; exit 5\n")
    launch.chmod(0o755)
    monkeypatch.setattr(api, "executable", lambda: str(launch))
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if has_output else None)
    run = streamrl.train(config, dataset=ROWS, wait=False)
    with pytest.raises(TransportError, match="launch: ended with exit code 5"):
        run.wait(DEADLINE_S)
    assert run.output.endswith("aaa\n\N{REPLACEMENT CHARACTER}\n")


@pytest.fixture
def hub_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the model in a cache of the hub, which cannot be reached."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "hub" / "models--somebody--tiny"
    shutil.copytree(model, repository / "snapshots" / "1234")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    return "somebody/tiny"


@pytest.mark.long
def test_a_run_of_a_model_by_its_hub_name_is_stopped_and_its_checkpoint_is_kept(config, hub_name):
    settings = {"run.max_steps": 100_000, "model.path": hub_name}
    run = streamrl.train(config, dataset=ROWS, settings=settings, wait=False, show=False)
    next(run.follow())
    run.stop(DEADLINE_S)
    assert run.exit_code == 128 + signal.SIGTERM
    assert run.checkpoint is not None


@pytest.mark.long
def test_the_daemons_end_with_the_script(config, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import streamrl

            def score(episode):
                return 1.0

            run = streamrl.train(
                {config!r},
                reward=score,
                dataset={ROWS!r},
                settings={{"run.max_steps": 100_000}},
                wait=False,
            )
            next(run.follow())
            print("begun", flush=True)
            run.wait()
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert any(line == b"begun\n" for line in process.stdout)
        daemons = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert len(daemons) >= 4
    assert not psutil.wait_procs(daemons, DEADLINE_S)[1]


@pytest.mark.long
def test_the_sweep_of_the_documents_compares_its_values(config, tmp_path: Path):
    """As it stands there, but for fewer runs, with a configuration of its own."""
    files = {file.name: file for file in write_files(tmp_path, "docs/python.md")}
    text = files["sweep.py"].read_text()
    assert text.count("(0, 4), (0, 1)") == 1
    files["sweep.py"].write_text(text.replace("(0, 4), (0, 1)", "(4,), (0, 1)"))
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(_with_rows(config, tmp_path)))
    done = subprocess.run(
        [sys.executable, files["sweep.py"]], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["buffer.max_staleness 4"]
    runs = [path.name for path in Path("runs").glob("sweep-*")]
    assert sorted(runs) == [f"sweep-{value}-{seed}" for value in (4,) for seed in (0, 1)]


def _with_rows(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {**config, "data": {**config["data"], "source": str(rows)}}
