"""What a soak reads of processes and folders, its plan, and what it finds left behind."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.research import processes, soak
from tests.research.growth import Verdict
from tests.research.processes import family_of, process_table, read_family
from tests.research.soak import Soak, left_behind
from tests.research.soak_faults import plan
from tests.research.soak_record import SOAK_FILE, disk_values, rows
from tests.waiting import block_until

ROLES = ("buffer", "learner", "generator-0", "generator-1")
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
gone = subprocess.Popen(["true"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process with a child that lives and one that it never waits for."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    block_until(lambda: getattr(read_family(process.pid, process_table()), "num_zombies", 0) == 1)
    yield process
    process.kill()
    process.wait()
    # An orphan; the process that inherits it waits for it.
    os.kill(child, 9)
    process.stdout.close()


def test_a_family_is_read_with_its_children_and_zombies(parent):
    table = process_table()
    reading = read_family(parent.pid, table)
    assert reading is not None
    assert (reading.num_children, reading.num_zombies, reading.num_threads) == (1, 1, 2)
    assert reading.rss_bytes > 2 * 2**20
    assert reading.num_descriptors >= 6
    (child,) = (pid for pid in list(family_of(parent.pid, table))[1:] if table[pid][1] != "Z")
    alone = read_family(parent.pid, table, apart_from={child})
    assert alone is not None
    assert alone.num_children == 0
    assert alone.rss_bytes < reading.rss_bytes


def test_sockets_and_descriptors_of_this_process_are_counted():
    gc.collect()  # What other tests left open would be closed below.
    before = read_family(os.getpid(), process_table())
    with socket.socket(), open(os.devnull):
        after = read_family(os.getpid(), process_table())
    assert before is not None
    assert after is not None
    assert after.num_sockets - before.num_sockets == 1
    assert after.num_descriptors - before.num_descriptors == 2


def test_a_process_that_has_ended_has_no_reading():
    process = subprocess.Popen(["true"])
    block_until(lambda: process_table().get(process.pid, (0, "Z"))[1] == "Z")
    assert read_family(process.pid, process_table()) is None
    process.wait()
    assert read_family(process.pid, process_table()) is None


def test_what_is_left_behind_is_found(parent, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(soak, "_ENDING_S", 0.0)
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "kept").touch()
    found = list(left_behind(tmp_path, frozenset({"kept", "removed"})))
    assert sum(f"process {parent.pid} is left: {sys.executable} -c" in line for line in found) == 1
    assert [line for line in found if "shared memory" in line] == [
        f"shared memory is left: {tmp_path / 'shm' / 'kept'}"
    ]
    assert "a temporary file is left: shm/kept" in found
    assert len(found) == 4, "the parent and its child, the memory, the file"


def test_a_run_that_left_nothing_behind(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert list(left_behind(tmp_path, frozenset({"never-made"}))) == []


def test_the_plan_is_a_function_of_the_seed_and_spares_no_kind():
    faults = plan(5, 600.0, 60, ROLES)
    assert faults == plan(5, 600.0, 60, ROLES)
    assert faults != plan(6, 600.0, 60, ROLES)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(30.0 <= fault.at_s <= 510.0 for fault in faults)
    kinds = Counter(fault.role.partition("-")[0] for fault in faults)
    assert kinds == {"buffer": 20, "learner": 20, "generator": 20}
    assert 15 < sum(fault.freeze_s > 0 for fault in faults) < 45
    assert all(fault.freeze_s <= 30.0 for fault in faults)


def test_the_folder_is_measured_by_its_parts(tmp_path: Path):
    for name, size in (
        ("metrics.jsonl", 1000),
        (SOAK_FILE, 9999),
        ("config.yaml", 10),
        ("logs/learner.log", 300),
        ("checkpoints/step-1/model.safetensors", 5000),
        ("buffer/journal.sqlite", 700),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    bytes_of = {name: round(1e6 * value) for name, value in disk_values(tmp_path).items()}
    assert bytes_of == {
        "run/records_mb": 1000,
        "run/other_mb": 10,
        "run/logs_mb": 300,
        "run/checkpoints_mb": 5000,
        "run/buffer_mb": 700,
        "run/weights_mb": 0,
        "run/quarantine_mb": 0,
    }


def test_a_process_that_was_started_again_begins_anew(tmp_path: Path):
    """Memory that a second life starts with, above the first one's, is no growth."""
    lines = [
        {
            "time_s": float(time_s),
            "lives": {"learner": 1 if time_s < 150 else 2},
            "values": {"learner/rss_mb": 100.0 if time_s < 150 else 400.0, "run/logs_mb": time_s},
        }
        for time_s in range(400)
    ]
    (tmp_path / SOAK_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    learner, run = rows(tmp_path / SOAK_FILE, warm_up_s=50.0)
    assert (learner.subject, learner.reading, learner.num_lives) == ("learner", "rss_mb", 2)
    assert (learner.trend.verdict, learner.trend.first) == (Verdict.STEADY, 400.0)
    assert (run.num_lives, run.trend.verdict) == (1, Verdict.GROWS)
    assert run.trend.per_minute == pytest.approx(60.0)


def test_a_soak_that_wrote_nothing_has_no_rows(tmp_path: Path):
    assert rows(tmp_path / SOAK_FILE, 1.0) == []


async def test_faults_are_injected_to_the_last_one_also_after_the_time():
    injected = []

    async def inject(children: object) -> None:
        await asyncio.sleep(0.01)
        injected.append(children)

    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    beside = {"_sample": for_ever, "_time_buffer_calls": for_ever}
    await Soak._observe(SimpleNamespace(_seconds=0.0, _inject=inject, **beside), ())
    assert injected == [()]
