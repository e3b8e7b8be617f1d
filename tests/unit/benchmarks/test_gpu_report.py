"""`make gpu-report`: its stages run on a CPU as small as they can be, and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.gpu import report
from tests.benchmarks.gpu.report import BEGIN, END, Stage


def small(tmp_path: Path, *names: str) -> list[list[dict[str, Any]]]:
    """The figures of these stages, each on a CPU."""
    words = ["--small", "--only", ",".join(names), "--folder", str(tmp_path)]
    assert report.main(words) == 0
    found = json.loads((tmp_path / "report.json").read_text())["stages"]
    return [found[name]["lines"] for name in names]


def test_the_learner_is_measured_beside_a_plain_trainer(tmp_path: Path, capsys):
    (lines,) = small(tmp_path, "learner")
    cases = {line["case"]: line for line in lines}
    assert cases["plain"]["ratio"] == 1.0
    assert cases["default"]["tokens_per_s"] > 0
    assert cases["offload"]["skipped"] == "needs a GPU"


@pytest.mark.long
def test_a_loop_and_a_run_that_learns_are_measured(tmp_path: Path, capsys):
    (loop,), (learning,) = small(tmp_path, "loop", "learning")
    assert (loop["ended"], loop["steps"]) == (0, 8)
    assert loop["mismatch_k3_kl"] < 1e-3
    assert learning["steps"] == 3
    assert len(learning["rewards"].split()) == 11


LINE = 'print(\'{"benchmark": "b", "case": "a|b", "seconds": 12345.6}\')'


def stage(name: str, code: str, limit_s: float = 120.0) -> Stage:
    return Stage(name, limit_s, ("-c", code), (), ("case", "seconds"))


def test_a_stage_that_fails_or_hangs_leaves_the_others_alone(tmp_path: Path, monkeypatch, capsys):
    stages = (
        stage("dies", f"{LINE}; raise SystemExit('no memory')"),
        stage("hangs", "import time; time.sleep(60)", 0.5),
        stage("works", LINE),
    )
    monkeypatch.setattr(report, "STAGES", stages)
    monkeypatch.setattr(report, "machine", lambda: ABOUT)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    words = ["--only", "dies,hangs,works", "--folder", str(tmp_path), "--docs", str(page)]
    assert report.main(words) == 1
    found = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert [found[name]["ok"] for name in found] == [False, False, True]
    assert found["dies"]["said"] == "exit code 1: no memory"
    assert found["hangs"]["said"] == "ended after 0 s"
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| a/b | 12,346 |") == 2


def test_a_stage_that_is_ended_has_said_what_it_knows(tmp_path: Path, monkeypatch, capsys):
    code = f"""{LINE}
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("== 3 failed, 40 passed ==")
"""
    # Python takes a while to begin.
    monkeypatch.setattr(report, "STAGES", (stage("tests", code, 5.0),))
    monkeypatch.setattr(report, "machine", lambda: ABOUT)
    assert report.main(["--only", "tests", "--folder", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "report.json").read_text())["stages"]["tests"]
    assert found["said"] == "ended after 5 s: 3 failed, 40 passed"
    assert [line["case"] for line in found["lines"]] == ["a|b"]


ABOUT = {"gpu": "H200", "torch": "2.13.0", "commit": "0123456", "date": "2026-11-28"}


def test_without_time_a_stage_is_not_started(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(report, "STAGES", (stage("late", "raise SystemExit(3)"),))
    assert report.main(["--only", "late", "--folder", str(tmp_path), "--limit-s", "1"]) == 1
    assert "late: no time left" in capsys.readouterr().out
