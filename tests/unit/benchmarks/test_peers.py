"""The pure parts of the comparisons with peers: when a reward is reached, CPU, tables, names."""

import json
import sys

import pytest

from tests.benchmarks.peers import run as comparisons
from tests.benchmarks.peers.quickstart import figures, reached_at
from tests.benchmarks.peers.table import tables
from tests.benchmarks.peers.usage import Usage, run


def test_a_reward_is_reached_when_the_mean_of_ten_steps_is():
    assert reached_at([0.0] * 10 + [1.0] * 20) == 18
    assert reached_at([0.95] * 12) == 9
    assert reached_at([0.5] * 30) is None
    assert reached_at([1.0] * 5) is None


def test_the_figures_of_a_run_leave_its_start_out():
    usage = Usage((0.0, 100.0, 140.0), (0.0, 90.0, 150.0), (10.0, 700.0, 600.0))
    times = [100.0 + step for step in range(31)]
    found = figures(usage, times, [0.0] * 10 + [1.0] * 21)
    assert (found["step_s"], found["step_cpu_s"]) == (1.0, 1.5)
    assert (found["to_reward_s"], found["to_reward_steps_s"], found["first_step_s"]) == (
        118,
        18,
        100,
    )
    assert found["peak_mib"] == 700


def test_the_cpu_of_children_that_have_ended_counts():
    work = "import time\nwhile time.process_time() < 0.4: pass"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {work!r}])"
    usage = run([sys.executable, "-c", f"{code}; time.sleep(2)"], {})
    assert usage.cpu_s[-1] >= 0.35
    assert usage.peak_mib > 1


def test_a_command_that_fails_shows_what_it_printed():
    with pytest.raises(SystemExit, match="no such thing"):
        run([sys.executable, "-c", "raise SystemExit('no such thing')"], {})


def test_a_table_has_a_row_for_each_system_and_the_reason_of_what_is_missing():
    lines = [
        {"benchmark": "steps", "system": "trl", "round": 0, "step_s": 3.0},
        {"benchmark": "steps", "system": "trl", "round": 1, "step_s": 5.0},
        {"benchmark": "steps", "system": "streamrl", "round": 0, "step_s": 2.0, "ratio": 2.0},
        {"benchmark": "trl_async", "system": "trl-async", "skipped": "no GPU"},
    ]
    steps, missing = tables(json.loads(json.dumps(lines)))
    assert "| trl | 4 (3 to 5) | - |" in steps
    assert "| streamrl | 2 | 2 |" in steps
    assert missing == "**trl_async**: trl-async skipped: no GPU"


def test_every_comparison_is_a_script_and_an_unknown_one_is_named():
    for comparison in comparisons.COMPARISONS.values():
        assert (comparisons.BENCHMARKS / comparison.script).is_file()
    with pytest.raises(SystemExit, match="--only: 'quickstrat' is none of quickstart"):
        comparisons.chosen("quickstrat")
