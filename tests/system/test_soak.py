"""Short soaks: one under faults, too short to judge memory by, and one whose reward leaks.

That the criterion finds nothing where nothing leaks is shown in `tests/unit/test_growth.py`.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.run_folder import read_json
from tests.research.script import run_script
from tests.research.soak import main, make_parser
from tests.system.conftest import CONFIG, DEADLINE_S, script

# As much in a second on any machine.
LEAKING = """
import time

kept, last_s = [], time.monotonic()

def score(episodes):
    global last_s
    now_s = time.monotonic()
    kept.append(bytearray(b"x") * int(10e6 * (now_s - last_s)))
    last_s = now_s
    return [1.0 for _ in episodes]
"""


def soak(folder: Path, model: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder, model=model))
    return subprocess.run(
        [*script("soak"), str(config), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def grown(folder: Path) -> list[str]:
    rows: list[dict[str, Any]] = read_json(folder / "run" / "soak.json")["rows"]
    return [
        f"{row['subject']} {row['reading']}" for row in rows if row["trend"]["verdict"] == "grows"
    ]


@pytest.mark.long
def test_a_soak_under_faults_is_audited_and_leaves_nothing(tmp_path: Path, model: Path):
    timing = ("--minutes", "0.3", "--warm-up", "60", "--faults-per-hour", "400", "--seed", "3")
    done = soak(tmp_path, model, *timing)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "run" / "soak.json")
    assert record["faults"] == []
    assert {row["trend"]["verdict"] for row in record["rows"]} == {"too short"}
    injected = record["injected"]
    assert len(injected) == 2
    assert {fault["freeze_s"] > 0 for fault in injected} == {True, False}
    subjects = {row["subject"] for row in record["rows"]}
    assert subjects == {"buffer", "learner", "generator-0", "launcher", "run"}
    samples = (tmp_path / "run" / "soak.jsonl").read_text().splitlines()
    lives = [json.loads(line)["lives"] for line in samples]
    killed = [fault["role"] for fault in injected if not fault["freeze_s"]]
    for role in killed:
        assert len({life[role] for life in lives if role in life}) == 2
    assert not any(psutil.pid_exists(pid) for life in lives for pid in life.values())


@pytest.mark.long
def test_a_reward_that_keeps_memory_is_found(tmp_path: Path, model: Path):
    (tmp_path / "leaking.py").write_text(LEAKING)
    reward = f"data.reward={tmp_path / 'leaking.py'}:score"
    timing = ("--minutes", "0.3", "--warm-up", "4", "--faults-per-hour", "0")
    done = soak(tmp_path, model, *timing, "--set", reward)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "generator-0 rss_mb" in grown(tmp_path)
    assert "WRONG: generator-0: rss_mb grows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minutes", "0"), "--minutes: was 0; it must be >= 0.1"),
        (("--faults-per-hour", "-3"), "--faults-per-hour: was -3; it must be >= 0"),
        (("--warm-up", "nan"), "--warm-up: was nan; it must be >= 0"),
        (("--minutes", "inf"), "--minutes: was inf; it must be >= 0.1, and finite"),
    ],
)
def test_a_soak_that_cannot_be_is_refused(tmp_path: Path, capsys, arguments, message):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=tmp_path))
    assert run_script(make_parser(), main, [str(config), *arguments]) == 2
    assert message in capsys.readouterr().err
