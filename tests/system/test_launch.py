"""Whole runs as separate processes: they end, the books close, and nobody's death changes that."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import psutil
import pytest

from learners.checkpoint import list_checkpoints
from tests.system.conftest import STREAMRL, Launched

Launch = Callable[..., Launched]
# Where a second generator would be one more to start, and nothing is said of it.
ONE = "generator.count=1"
COLUMNS = ("leased", "buffered", "taken", "trained", "acknowledged")


def _set(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def assert_books_close(run: Launched) -> None:
    for line in run.lines:
        dropped = sum(v for name, v in line.items() if name.startswith("buffer/dropped_"))
        columns = sum(line[f"buffer/{column}"] for column in COLUMNS)
        assert line["buffer/granted"] == columns + dropped, line["step"]
    books = run.books
    assert books["granted"] == sum(books[c] for c in COLUMNS) + sum(books["dropped"].values())
    assert books["balanced"] is True


def assert_audit_passes(run: Launched) -> None:
    command = [STREAMRL, "buffer", "audit", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("in order\n")


def assert_every_step_once(run: Launched, num_steps: int) -> list[dict[str, Any]]:
    lines = run.lines
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    return lines


def test_a_run_learns_asynchronously_within_its_staleness_bound(launch: Launch):
    sizes = ("learner.groups_per_step=16", "generator.group_size=8", "generator.max_num_seqs=64")
    run = launch(*_set("run.max_steps=60", "run.evaluate=true", *sizes))
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, 60)
    assert_books_close(run)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-15:]) > sum(rewards[:15]) + 15 * 0.2, rewards
    assert max(line["buffer/staleness_max"] for line in lines) <= 2
    assert sum(line["buffer/staleness_mean"] for line in lines) > 0
    counts = [line["generator/count"] for line in lines]
    assert set(counts[counts.index(2) :]) == {2}, counts
    assert run.books["acknowledged"] == 60 * 16
    assert (run.folder / "report.png").stat().st_size > 10_000
    assert "the books close" in run.output
    assert "greedy reward, held out" in run.output
    for role in ("buffer", "learner", "generator-0", "generator-1"):
        assert f"{role}: done" in run.log(role)


def test_without_staleness_the_algorithm_is_synchronous(launch: Launch):
    run = launch(*_set("buffer.max_staleness=0", "run.max_steps=6", ONE))
    assert run.end() == 0, run.output
    lines = assert_every_step_once(run, 6)
    assert {line["buffer/staleness_max"] for line in lines} == {0}
    assert {line["buffer/dropped_stale"] for line in lines} == {0}
    for line in lines:
        assert line["mismatch/rollout_is_max"] == pytest.approx(1.0, abs=1e-3)
        assert line["mismatch/rollout_is_min"] == pytest.approx(1.0, abs=1e-3)
    assert_books_close(run)


def test_a_killed_generator_costs_its_leases_only(launch: Launch):
    run = launch(*_set("run.max_steps=150"))
    run.until(lambda: "generator-1 serves" in run.log("generator-1"))
    run.until_step(3)
    run.child("generator-1").kill()
    killed_at = len(run.lines)
    run.until_step(killed_at + 3)
    run.until(lambda: run.log("generator-1").count("generator-1 serves") == 2)
    assert run.end() == 0, run.output
    assert_every_step_once(run, 150)
    assert_books_close(run)
    assert run.books["acknowledged"] == 150 * 4
    assert "generator-1: done" in run.log("generator-1")


def test_a_killed_learner_goes_on_from_its_checkpoint_and_the_books_are_the_same(launch: Launch):
    run = launch(*_set("run.max_steps=14", ONE))
    run.until_step(5)
    run.child("learner").kill()
    assert run.end() == 0, run.output
    assert_every_step_once(run, 14)
    assert_books_close(run)
    assert run.books["acknowledged"] == 14 * 4
    log = run.log("learner")
    assert "starting from" in log.split("attached")[1]
    assert log.count("attached at version") == 2
    assert_audit_passes(run)


def test_a_run_whose_every_process_died_is_resumed(launch: Launch):
    first = launch(*_set("run.max_steps=14", ONE))
    first.until_step(5)
    processes = psutil.Process(first.process.pid).children(recursive=True)
    for process in [*processes, psutil.Process(first.process.pid)]:
        process.kill()
    first.process.communicate()
    second = launch("--resume", *_set("run.max_steps=14", ONE))
    assert second.end() == 0, second.output
    lines = assert_every_step_once(second, 14)
    assert_books_close(second)
    assert second.books["acknowledged"] == 14 * 4
    assert "recovered" in second.log("buffer")
    assert "orphaned" not in second.books["dropped"]
    assert_audit_passes(second)
    assert all(a["buffer/acknowledged"] <= b["buffer/acknowledged"] for a, b in pairwise(lines))


def test_a_killed_buffer_goes_on_as_if_nothing_had_happened(launch: Launch):
    run = launch(*_set("run.max_steps=40"))
    for step in (5, 10):
        run.until_step(step)
        run.child("buffer").kill()
    assert run.end() == 0, run.output
    assert_every_step_once(run, 40)
    assert_books_close(run)
    assert_audit_passes(run)
    assert run.books["acknowledged"] == 40 * 4
    assert run.log("buffer").count("recovered") == 2
    for role in ("learner", "generator-0", "generator-1"):
        assert run.log(role).count(f"{role}: done") == 1
        assert "crashed" not in run.log(role)


def test_a_killed_buffer_without_a_journal_is_told_what_it_was(launch: Launch):
    run = launch(*_set("run.max_steps=40", "buffer.journal=false", ONE))
    run.until_step(5)
    run.child("buffer").kill()
    assert run.end() == 0, run.output
    assert_every_step_once(run, 40)
    assert_books_close(run)
    log = run.log("learner")
    assert "attaching again" in log
    assert log.count("starting from") == 1


def test_a_buffer_restored_from_an_older_copy_is_told_what_came_after(launch: Launch):
    run = launch(*_set("run.max_steps=60"))
    folder, copy = run.folder / "buffer", run.folder / "copy"
    run.until_step(4)
    buffer = run.child("buffer")
    buffer.suspend()
    shutil.copytree(folder, copy)
    buffer.resume()
    run.until_step(10)
    buffer = run.child("buffer")
    buffer.suspend()
    shutil.rmtree(folder)
    copy.rename(folder)
    buffer.kill()
    assert run.end() == 0, run.output
    assert_every_step_once(run, 60)
    assert_books_close(run)
    assert_audit_passes(run)
    assert "attaching again" in run.log("learner")
    assert "asserting" in run.log("generator-0") + run.log("generator-1")
    assert run.log("learner").count("starting from") == 1


def test_sigterm_ends_a_daemon_within_ten_seconds_with_its_leases_released(launch: Launch):
    run = launch(*_set("run.max_steps=100000"))
    run.until_step(3)
    terminate(run, "generator-0")
    step = len(run.lines)
    run.until_step(step + 5)
    assert run.lines[-1]["generator/count"] == 1
    assert run.lines[-1]["buffer/dropped_expired"] == 0
    terminate(run, "learner")
    newest = list_checkpoints(run.folder / "checkpoints")[-1].name
    assert newest == f"step-{run.lines[-1]['step']:08d}"


def terminate(run: Launched, role: str) -> None:
    start = time.monotonic()
    run.child(role).send_signal(signal.SIGTERM)
    done = f"{role}: done"
    run.until(lambda: done in run.log(role))
    assert time.monotonic() - start < 10


def test_all_generators_are_restarted_one_after_the_other_and_the_learner_goes_on(
    launch: Launch,
):
    run = launch(*_set("run.max_steps=100000", "buffer.lease_ttl_s=30"))
    run.until_step(3)
    config = str(run.folder / "config.yaml")
    names, started = ("generator-0", "generator-1"), []
    try:
        for name in names:
            drain = [STREAMRL, "generators", "drain", config, name]
            assert subprocess.run(drain, check=False).returncode == 0
            run.until(lambda name=name: f"{name}: done" in run.log(name))
            run.until(lambda: run.lines[-1]["generator/count"] == 1)
            start = [STREAMRL, "generator", "--config", config, "--id", name]
            started.append(subprocess.Popen(start))
            run.until(lambda: run.lines[-1]["generator/count"] == 2)
            run.until_step(len(run.lines) + 3)
        run.until(lambda: _states(config) == dict.fromkeys(names, "active"))
        lines = run.lines
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert all(line["buffer/staleness_max"] <= 2 for line in lines)
    dropped = {name: lines[-1][f"buffer/dropped_{name}"] for name in ("expired", "released")}
    assert dropped == {"expired": 0, "released": 0}
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.output
    assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert_audit_passes(run)


def _states(config: str) -> dict[str, str]:
    command = [STREAMRL, "generators", config, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {member["id"]: member["state"] for member in json.loads(done.stdout)}


def test_ctrl_c_stops_everybody_and_the_run_can_go_on(launch: Launch):
    run = launch(*_set("run.max_steps=100000", ONE))
    run.until_step(4)
    processes = psutil.Process(run.process.pid).children()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.output
    assert not any(process.is_running() for process in processes)
    assert "--resume" in run.output
    steps = len(run.lines)
    assert run.books["leased"] == 0
    assert_books_close(run)
    again = launch("--resume", *_set(f"run.max_steps={steps + 3}", ONE))
    assert again.end() == 0, again.output
    assert_every_step_once(again, steps + 3)
    assert_books_close(again)


def test_a_configuration_that_cannot_work_ends_the_launch_with_the_reason(launch: Launch):
    run = launch(*_set("data.reward=exact_macth", ONE))
    assert run.end() == 2
    assert "did you mean 'exact_match'?" in run.output
