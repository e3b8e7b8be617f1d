"""A launch that cannot go on says why in one sentence, at once; Ctrl-C ends it cleanly."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl.cli.main import main
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import Launched, allow_groups, held_reward
from tests.system.test_launch import assert_audit_passes, assert_every_step_once

Launch = Callable[..., Launched]

NO_LABEL = """
def score(episode):
    return float(episode.prompt.row["label"])
"""
NO_WANDB = "raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')\n"


def test_a_reward_that_always_raises_ends_the_launch_with_its_line(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "broken.py"
    file.write_text(NO_LABEL)
    run = launch(*set_options(f"data.reward={file}:score", "run.max_steps=2"))
    assert run.end() == 4, run.output
    sentence = f"reward {file}:score: KeyError: 'label' (broken.py:3); 32 groups have failed"
    assert run.output.splitlines()[-1].startswith(f"streamrl launch: generator-0: {sentence}")
    assert "Traceback" not in run.output
    log = run.log("generator-0")
    assert log.count("generator-0 serves") == 1
    assert 'return float(episode.prompt.row["label"])' in log
    assert main(["status", str(run.folder)]) == 1
    assert f"! failed: generator-0: {sentence}" in capsys.readouterr().out
    assert (run.folder / "report.html").exists()


@pytest.mark.long
def test_a_package_that_is_missing_ends_the_launch_with_the_remedy(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "wandb.py").write_text(NO_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch(*set_options("tracking.wandb=offline"))
    assert run.end() == 2, run.output
    sentence = "tracking.wandb: needs wandb, which is not installed: pip install 'streamrl[wandb]'"
    assert run.output.endswith(f"streamrl launch: learner: {sentence}\n")
    assert "Traceback" not in run.output


def test_a_redis_that_does_not_run_is_named(launch: Launch):
    url = f"redis://127.0.0.1:{free_port()}/0"
    run = launch(*set_options(f"buffer.url={url}"))
    assert run.end() == 5, run.output
    assert f"warning: buffer.url: no Redis answers at {url}" in run.output
    assert f"streamrl launch: buffer books: Redis at {url} has not answered" in run.output
    assert "Traceback" not in run.output


@pytest.mark.long
def test_ctrl_c_ends_each_phase_cleanly_and_the_hint_goes_on(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reward = f"data.reward={held_reward(tmp_path, num_groups=0)}"
    settings = set_options("run.max_steps=6", "run.evaluate=true", reward)
    starting = launch(*settings)
    starting.until(lambda: (starting.folder / "logs" / "learner.log").exists())
    # As a terminal that closes does it.
    config = interrupt(starting, signal.SIGHUP, times=2)
    assert main(["status", str(config)]) == 0
    assert f"before the first step; streamrl launch {config} --resume" in capsys.readouterr().out

    # Two steps at least, and five at most.
    allow_groups(tmp_path, 5 * 4)
    stepping = launch("--resume", file=config)
    stepping.until_step(2)
    assert interrupt(stepping, times=2) == config

    # All that the generator is to score, and not all of the 32 held-out prompts.
    allow_groups(tmp_path, 7 * 4)
    evaluating = launch("--resume", file=config)
    evaluating.until(lambda: has_child(evaluating, "evaluate"))
    interrupt(evaluating, command="evaluate")
    assert_every_step_once(evaluating, 6)
    assert_audit_passes(evaluating)
    assert not (evaluating.folder / "evaluation.json").exists()


def interrupt(
    run: Launched,
    number: signal.Signals = signal.SIGINT,
    *,
    times: int = 1,
    command: str = "launch",
) -> Path:
    """Ends the launch by this signal; the configuration that its hint names."""
    processes = psutil.Process(run.process.pid).children(recursive=True)
    for _ in range(times):
        run.process.send_signal(number)
    assert run.end() == 128 + number, run.output
    assert not any(process.is_running() for process in processes)
    assert "Traceback" not in run.output
    hint = run.output.splitlines()[-1]
    file = run.folder / "config.yaml"
    resume = " --resume" if command == "launch" else ""
    assert hint == f"stopped; to continue: streamrl {command} {file}{resume}"
    return file


def has_child(run: Launched, word: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(run.process.pid).children()
        return any(word in child.cmdline() for child in children)
    return False
