"""A whole run whose generator starts an SGLang server, for which one of ours stands in."""

import os
from pathlib import Path

import psutil

from tests.engines import ROOT

STAND_IN = os.pathsep.join([str(ROOT / "tests" / "standins" / "packages"), str(ROOT)])
NUM_STEPS = 8


def servers_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(words := process.info["cmdline"] or [])
        and "sglang.launch_server" in words
    ]


def test_a_run_with_a_server_of_its_own(launch, model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STAND_IN)
    # Synchronous, so that every token's log-probability can be compared with the learner's.
    overrides = [
        "generator.engine=sglang",
        "generator.count=1",
        "buffer.max_staleness=0",
        f"run.max_steps={NUM_STEPS}",
    ]
    run = launch(*(word for override in overrides for word in ("--set", override)))
    run.until_step(1)
    assert servers_of(model)
    assert run.end() == 0, run.output
    assert [line["step"] for line in run.lines] == list(range(1, NUM_STEPS + 1))
    assert run.books["balanced"] is True
    assert run.books["dropped"].get("failed", 0) == 0
    gaps = [abs(line["mismatch/staleness_0/kl"]) for line in run.lines]
    assert max(gaps) < 1e-4, gaps
    assert {line["buffer/staleness_max"] for line in run.lines} == {0}, "an update was not loaded"
    assert not servers_of(model)
    (log,) = (run.folder / "logs").glob("sglang-*.log")
    assert "Traceback" not in log.read_text()
