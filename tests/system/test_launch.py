"""Whole runs as separate processes: they end, the books close, whichever process dies."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.checkpoints.find import list_checkpoints
from streamrl.cli.main import main
from streamrl.types import DropReason, RefusalReason
from tests.settings import set_options
from tests.system.conftest import DEADLINE_S, STOP_S, STREAMRL, Launched, RunFolder, slow_reward

Launch = Callable[..., Launched]
TWO = "generator.count=2"
COLUMNS = ("leased", "buffered", "taken", "trained", "acknowledged")


def assert_books_close(run: RunFolder) -> None:
    for line in run.lines:
        dropped = sum(v for name, v in line.items() if name.startswith("buffer/dropped_"))
        columns = sum(line[f"buffer/{column}"] for column in COLUMNS)
        assert line["buffer/granted"] == columns + dropped, line["step"]
    books = run.books
    assert books["granted"] == sum(books[c] for c in COLUMNS) + sum(books["dropped"].values())
    assert books["balanced"] is True


def assert_audit_passes(run: RunFolder) -> None:
    output = output_of("buffer", "audit", str(run.folder))
    assert output.endswith("in order\n"), output


def output_of(*arguments: str) -> str:
    """What this command of `streamrl` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0, printed.getvalue()
    return printed.getvalue()


def assert_undisturbed(run: RunFolder, output: str) -> None:
    """No process was started again and no group was lost by a fault, which a run survives."""
    assert "started again" not in output, output
    lost = {DropReason.FAILED, DropReason.MALFORMED, DropReason.ORPHANED}
    assert not lost & run.books["dropped"].keys(), run.books["dropped"]
    refused = {reason: run.lines[-1][f"buffer/refused_{reason}"] for reason in RefusalReason}
    assert not refused[RefusalReason.MALFORMED], refused


def assert_every_step_once(run: RunFolder, num_steps: int) -> list[dict[str, Any]]:
    lines = run.lines
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    return lines


def test_a_run_learns_asynchronously_within_its_staleness_bound(launch: Launch):
    sizes = ("learner.groups_per_step=16", "generator.group_size=8", "generator.max_num_seqs=64")
    # One that the machine does not let run for some seconds is no less there.
    leases = "buffer.lease_ttl_s=60"
    run = launch(*set_options("run.max_steps=60", "run.evaluate=true", TWO, leases, *sizes))
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, 60)
    assert_books_close(run)
    assert_undisturbed(run, run.output)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-15:]) > sum(rewards[:15]) + 15 * 0.2, rewards
    assert max(line["buffer/staleness_max"] for line in lines) <= 2
    assert sum(line["buffer/staleness_mean"] for line in lines) > 0
    counts = [line["generator/count"] for line in lines]
    assert counts == sorted(counts), counts
    assert run.books["acknowledged"] == 60 * 16
    assert (run.folder / "report.html").stat().st_size > 10_000
    assert "the books close" in run.output
    assert "held-out reward" in run.output
    for role in ("buffer", "learner", "generator-0", "generator-1"):
        assert f"{role}: done" in run.log(role)


def test_without_staleness_the_algorithm_is_synchronous(launch: Launch):
    run = launch(*set_options("buffer.max_staleness=0", "run.max_steps=6"))
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, 6)
    assert {line["buffer/staleness_max"] for line in lines} == {0}
    assert {line["buffer/dropped_stale"] for line in lines} == {0}
    for line in lines:
        assert line["mismatch/rollout_is_max"] == pytest.approx(1.0, abs=1e-3)
        assert line["mismatch/rollout_is_min"] == pytest.approx(1.0, abs=1e-3)
    assert_books_close(run)


def test_a_run_continues_after_its_learner_or_every_process_was_killed_and_after_ctrl_c(
    launch: Launch,
):
    endless = set_options("run.max_steps=100000")
    first = launch(*endless, strict=False)
    first.until_step(5)
    first.kill("learner")
    at_kill = first.newest["step"]
    first.until(lambda: first.log("learner").count("attached at version") == 2)
    first.until_step(at_kill + 1)
    processes = psutil.Process(first.process.pid).children(recursive=True)
    for process in [*processes, psutil.Process(first.process.pid)]:
        process.kill()
    first.process.communicate()

    second = launch("--resume", *endless)
    second.until_step(len(second.lines) + 3)
    log = second.log("learner").split("attached at version")
    assert ["starting from" in words for words in log] == [True, True, True, False]
    processes = psutil.Process(second.process.pid).children()
    second.process.send_signal(signal.SIGINT)
    assert second.end() == 130, second.output
    assert not any(process.is_running() for process in processes)
    assert f"to continue: streamrl launch {second.folder}/config.yaml --resume" in second.output
    assert second.books["leased"] == 0
    assert_books_close(second)

    num_steps = len(second.lines) + 3
    third = launch("--resume", *set_options(f"run.max_steps={num_steps}"))
    assert third.end() == 0, third.output
    lines = assert_every_step_once(third, num_steps)
    assert_books_close(third)
    assert third.books["acknowledged"] == num_steps * 4
    assert third.log("buffer").count("recovered") == 2
    assert "orphaned" not in third.books["dropped"]
    assert_audit_passes(third)
    assert all(a["buffer/acknowledged"] <= b["buffer/acknowledged"] for a, b in pairwise(lines))


def test_a_steered_bound_is_audited_and_outlasts_a_killed_learner(launch: Launch):
    """A learner that is synchronous waits, so the bound is raised after nine steps."""
    steered = set_options("buffer.max_staleness={min: 0, max: 3, ess: 0.2}")
    first = launch(*steered, *set_options("run.max_steps=100000"), strict=False)

    def bounds() -> list[int]:
        return [line["buffer/staleness_bound"] for line in first.lines]

    first.until(lambda: bounds()[-1:] >= [1])
    saved = len(first.lines) + 3
    first.until_step(saved + 1)
    first.kill("learner")
    at_kill = first.newest["step"]
    first.until(lambda: first.log("learner").count("attached at version") == 2)
    first.until_step(at_kill + 1)
    assert min(bounds()[saved - 1 :]) >= 1, bounds()
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130, first.output
    assert set(bounds()[:8]) == {0}
    assert max(line["buffer/staleness_max"] for line in first.lines) <= 3
    assert "buffer.max_staleness steered from 0 to 1: the effective" in first.log("learner")
    assert_audit_passes(first)
    printed = " ".join(output_of("buffer", "audit", str(first.folder)).split())
    assert "steered the bound from 0 to 1: the effective sample size of the last 8" in printed


def test_a_killed_buffer_continues_and_an_older_copy_of_its_journal_is_brought_up_to_date(
    launch: Launch,
):
    run = launch(*set_options("run.max_steps=100000", TWO), strict=False)
    for num_kills in (1, 2):
        run.until_step(3 * num_kills)
        run.kill("buffer")
        run.until(lambda count=num_kills: run.log("buffer").count("recovered") == count)
    folder, copy = run.folder / "buffer", run.folder / "copy"
    run.until_step(run.newest["step"] + 2)
    assert "attaching again" not in run.log("learner")
    buffer = run.child("buffer")
    buffer.suspend()
    shutil.copytree(folder, copy)
    buffer.resume()
    run.until_step(run.newest["step"] + 5)
    buffer.suspend()
    shutil.rmtree(folder)
    copy.rename(folder)
    buffer.kill()
    run.until(lambda: "attaching again" in run.log("learner"))
    run.until(lambda: "asserting" in run.log("generator-0") + run.log("generator-1"))
    run.until_step(run.newest["step"] + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert_audit_passes(run)
    assert run.log("learner").count("starting from") == 1
    for role in ("learner", "generator-0", "generator-1"):
        assert run.log(role).count(f"{role}: done") == 1
        assert "crashed" not in run.log(role)


@pytest.mark.long
def test_a_killed_buffer_without_a_journal_gets_its_state_back(launch: Launch):
    run = launch(*set_options("run.max_steps=100000", "buffer.journal=false"), strict=False)
    run.until_step(5)
    run.kill("buffer")
    run.until(lambda: "attaching again" in run.log("learner"))
    run.until_step(run.newest["step"] + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert run.log("learner").count("starting from") == 1


@pytest.mark.long
def test_what_a_killed_launcher_has_started_drains_and_the_buffer_ends_last(launch: Launch):
    run = launch(*set_options("run.max_steps=100000"))
    run.until_step(3)
    daemons = psutil.Process(run.process.pid).children()
    run.process.kill()
    _, alive = psutil.wait_procs(daemons, timeout=DEADLINE_S)
    assert not alive
    for role in ("learner", "generator-0", "buffer"):
        assert f"{role}: done" in run.log(role).splitlines()[-1]
    newest = list_checkpoints(run.folder)[-1].name
    assert newest == f"step-{run.lines[-1]['step']:08d}"
    assert run.books["leased"] == 0


def test_sigterm_ends_a_daemon_in_time_and_a_kill_costs_the_leases_only(
    launch: Launch, tmp_path: Path
):
    reward = f"data.reward={slow_reward(tmp_path, seconds=0.3)}"
    leases = "buffer.lease_ttl_s=10"
    run = launch(*set_options("run.max_steps=100000", TWO, leases, reward), strict=False)
    run.until_generators(2)
    terminate(run, "generator-0")
    run.until_step(len(run.lines) + 5)
    assert run.lines[-1]["generator/count"] == 1
    assert run.lines[-1]["buffer/dropped_expired"] == 0
    run.child("generator-1").kill()
    run.until(lambda: run.log("generator-1").count("generator-1 serves") == 2)
    run.until_step(len(run.lines) + 3)
    terminate(run, "learner")
    newest = list_checkpoints(run.folder)[-1].name
    assert newest == f"step-{run.lines[-1]['step']:08d}"
    assert run.end() == 0, run.output
    num_steps = len(run.lines)
    assert_every_step_once(run, num_steps)
    assert_books_close(run)
    assert run.books["acknowledged"] == num_steps * 4
    assert "generator-1: done" in run.log("generator-1")


def terminate(run: Launched, role: str) -> None:
    start = time.monotonic()
    run.child(role).send_signal(signal.SIGTERM)
    done = f"{role}: done"
    run.until(lambda: done in run.log(role))
    assert time.monotonic() - start < STOP_S


@pytest.mark.long
def test_all_generators_are_restarted_one_after_the_other_and_the_learner_goes_on(
    launch: Launch, tmp_path: Path
):
    reward = f"data.reward={slow_reward(tmp_path, seconds=1.0)}"
    run = launch(*set_options("run.max_steps=100000", TWO, "buffer.lease_ttl_s=30", reward))
    run.until_generators(2)
    config = str(run.folder / "config.yaml")
    names, started = ("generator-0", "generator-1"), []
    try:
        for name in names:
            output_of("generators", "drain", config, name)
            run.until(lambda name=name: f"{name}: done" in run.log(name))
            run.until_generators(1)
            start = [STREAMRL, "generator", "--config", config, "--id", name]
            started.append(subprocess.Popen(start))
            run.until_generators(2)
            run.until_step(len(run.lines) + 3)
        run.until(lambda: _states(config) == dict.fromkeys(names, "active"))
        lines = run.lines
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
    assert all(line["buffer/staleness_max"] <= 2 for line in lines)
    dropped = {name: lines[-1][f"buffer/dropped_{name}"] for name in ("expired", "released")}
    assert dropped == {"expired": 0, "released": 0}
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert "finishing the step and saving it; Ctrl-C again stops now" in run.output
    assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert_audit_passes(run)


def _states(config: str) -> dict[str, str]:
    listed = json.loads(output_of("generators", config, "--json"))
    return {row["id"]: row["state"] for row in listed}


def test_a_configuration_that_cannot_work_ends_the_launch_with_the_reason(
    launch: Launch, tmp_path: Path
):
    run = launch(*set_options(f"buffer.curve={tmp_path}"))
    assert run.end() == 2
    assert "buffer.curve: cannot read " in run.output
    assert "`streamrl keys new FOLDER` makes the keys" in " ".join(run.output.split())
