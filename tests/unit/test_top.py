"""`streamrl top`: what is shown of any run, and that a terminal is as it was afterwards."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from streamrl.cli.main import main
from streamrl.cli.status import RunStatus
from streamrl.cli.top.panels import render
from streamrl.cli.top.reading import RunReader
from streamrl.cli.top.snapshot import RunSnapshot, make_snapshot
from streamrl.diagnosis import Reading
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    LearnerActivity,
    LearnerStatus,
    OverduePolicy,
)
from tests.terminal import LEFT, Terminal, is_put_back
from tests.unit.test_displays import make_run

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
ENDED = {"activity": LearnerActivity.ENDED, "policy_version": 6}


def generator(number: int, **fields: Any) -> GeneratorStatus:
    known = {"generator_id": f"generator-{number}", "session": f"s{number}", "policy_version": 41}
    known = {**known, "lease_ids": ("a", "b"), "lease_ages_s": (1.0, 9.5), "tokens_per_s": 1234.5}
    known = {**known, "max_num_groups": 4, "busy_s": 30.0, "uptime_s": 60.0, "pause_s": 3.0}
    return GeneratorStatus(**{**known, "kv_usage": 0.42, **fields})


def stats(num_generators: int = 2) -> BufferStats:
    return BufferStats(
        incarnation="i",
        policy_version=42,
        groups_per_step=16,
        max_staleness=2,
        overdue=OverduePolicy.WAIT,
        books=Books(
            granted=60,
            leased=8,
            buffered=4,
            taken=16,
            trained=30,
            dropped={DropReason.FAILED: 2},
            learner_term=1,
        ),
        generators=tuple(generator(i) for i in range(num_generators)),
        heartbeat_ages_s=tuple(0.5 for _ in range(num_generators)),
    )


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward/mean": step / 50,
        "learner/step_s": 2.0,
        "learner/wait_s": 0.5,
        "learner/wait_due_s": 0.25,
        "learner/forward_s": 0.6,
        "learner/backward_s": 0.8,
        "learner/tokens_per_s": 9000.0,
        "generator/tokens_per_s": 2500.0,
        "generator/count": 2,
        "buffer/staleness_mean": 1.5,
        "buffer/staleness_max": 2,
        "buffer/staleness_1/num_groups": 8,
        "buffer/staleness_2/num_groups": 8,
        "mismatch/rollout_is_eff_sample_size": 0.91,
        "mismatch/mismatch_kl": 0.002,
        "scaling/steps_per_s": 0.5,
        "scaling/steps_per_s_generator_added": 0.6,
        "scaling/steps_per_s_rank_added": 0.5,
        "scaling/num_generators_wanted": 3,
        "scaling/rest_frac": 0.0,
        "generator/idle_frac": 0.1,
    }


def snapshot(num_generators: int = 2, num_lines: int = 42) -> RunSnapshot:
    learner = LearnerStatus(
        policy_version=42,
        learner_term=1,
        activity=LearnerActivity.COMPUTING,
        activity_s=0.5,
        time_s=0.0,
    )
    reading = Reading(
        stall_s=300.0, stats=stats(num_generators), learner=learner, max_steps=100, idle_s=1.0
    )
    lines = [line(step) for step in range(1, num_lines + 1)]
    status = RunStatus("run", reading, lines[-1] if lines else {})
    return make_snapshot(status, lines, num_newest=20, time_s=1e9)


def shown(of: RunSnapshot, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render(of, width))
    return capture.get().splitlines()


def test_a_snapshot_has_what_a_run_does():
    found = snapshot()
    assert (found.state, found.step, found.policy_version, found.eta_s) == ("running", 42, 42, 116)
    assert found.step_time is not None
    assert found.step_time.parts == pytest.approx(
        {"wait": 0.5, "forward": 0.6, "backward": 0.8, "other": 0.1}
    )
    assert found.staleness is not None
    assert found.staleness.num_groups["1"] == 160
    assert found.books is not None
    assert (found.books.granted, found.books.capacity, found.books.balanced) == (60, 48, True)
    assert found.mismatch == pytest.approx({"eff_sample_size": 0.91, "kl": 0.002})
    first = found.generators[0]
    assert (first.kv_usage, first.busy_frac, first.pause_frac) == (0.42, 0.5, 0.05)
    assert (first.num_leases, first.policy_version, first.heartbeat_age_s) == (2, 41, 0.5)
    assert found.scaling is not None
    assert found.scaling.limit == "generators"


FIELDS = {
    *("schema", "run", "time_s", "state", "outcome", "headline", "findings", "notes", "pending"),
    *("policy_version", "step", "max_steps", "num_steps", "steps_per_s", "eta_s", "learner"),
    *("reward", "rewards", "step_time", "books", "staleness", "mismatch", "generators", "scaling"),
    *("generated_tokens_per_s", "trained_tokens_per_s", "unknown"),
}


def test_the_record_for_programs_keeps_its_names():
    found = json.loads(json.dumps(msgspec.to_builtins(snapshot(), str_keys=True)))
    assert found["schema"] == 1
    assert found.keys() == FIELDS
    assert found["generators"][0].keys() == {
        *("id", "state", "policy_version", "num_versions_behind", "num_leases", "oldest_lease_s"),
        *("num_active", "tokens_per_s", "busy_frac", "kv_usage", "pause_frac", "heartbeat_age_s"),
    }


def test_a_note_shows_no_escapes_of_a_reply():
    noted = msgspec.structs.replace(snapshot(), notes=("1 of 9 groups failed: \x1b]0;title\x07",))
    text = " ".join(shown(noted, 120))
    assert "\\x1b]0;title\\x07" in text
    assert "\x1b]" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("num_generators", [0, 2, 40])
def test_every_line_fits_the_terminal(width: int, num_generators: int):
    lines = shown(snapshot(num_generators), width)
    assert max(cell_len(text) for text in lines) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("step time", "staleness", "importance sampling", "the books close", "ETA 1:56"):
        assert part in text
    if num_generators and width >= 80:
        assert "generator-1" in text
        assert " 42 %" in text


def test_before_the_first_step_what_is_missing_is_said():
    text = "\n".join(shown(snapshot(num_lines=0), 80))
    assert "not known: step times, reward, staleness, mismatch and hints come with" in text
    assert "generator-0" in text


def once(capsys: pytest.CaptureFixture[str], target: object) -> dict[str, Any]:
    assert main(["top", str(target), "--once", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_that_has_ended_is_shown_with_how(tmp_path, capsys):
    config = make_run(tmp_path, **ENDED)
    found = once(capsys, config.run.path)
    assert found["outcome"] == "stopped at step 6 of 550, 0 s ago"
    assert found["unknown"] == [
        "generators and leases are known to the buffer alone, which does not answer"
    ]
    assert main(["top", str(config.run.path), "--once"]) == 0
    assert "stopped at step 6 of 550" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "learner.json", "books.json", "samples.jsonl"])
@pytest.mark.parametrize(
    "content",
    [b"\x00\xff\xfe", b"{", b"[1, 2]\n", b'{"step": "x", "reward/mean": "good"}\n', b""],
)
def test_a_damaged_file_is_left_out(tmp_path, capsys, name, content):
    config = make_run(tmp_path, **ENDED)
    (config.run.path / name).write_bytes(content)
    assert once(capsys, config.run.path)["run"] == "run"
    assert main(["top", str(config.run.path), "--once"]) == 0


@pytest.mark.parametrize(
    "value", ['"fast"', "NaN", "Infinity", "1e999", "null", "[]", str(10**400)]
)
def test_a_metric_that_is_no_number_is_left_out(tmp_path, capsys, value):
    config = make_run(tmp_path, **ENDED)
    text = f'{{"step": 7, "reward/mean": {value}, "learner/step_s": {value}, "time_s": {value}}}\n'
    (config.run.path / "metrics.jsonl").write_text(text)
    found = once(capsys, config.run.path)
    assert (found["step"], found["reward"], found["steps_per_s"]) == (7, None, None)


def test_a_folder_whose_configuration_is_damaged_is_a_sentence(tmp_path, capsys):
    config = make_run(tmp_path, **ENDED)
    (config.run.path / "config.yaml").write_text("run: [")
    assert main(["top", str(config.run.path), "--once"]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_url_that_nobody_answers_is_a_reading(capsys):
    found = once(capsys, "zmq://127.0.0.1:9")
    assert found["findings"][0]["cause"] == "buffer_unreachable"
    assert "stand in the run's folder" in found["unknown"][0]
    assert main(["top", "redis://h", "--once"]) == 2


def test_without_a_terminal_the_other_ways_are_named(tmp_path, capsys):
    config = make_run(tmp_path, **ENDED)
    assert main(["top", str(config.run.path)]) == 2
    assert "--once prints one reading, `streamrl watch` prints lines" in capsys.readouterr().err
    assert main(["top", str(config.run.path), "--json"]) == 2
    assert "--json: is for --once" in capsys.readouterr().err


def test_a_folder_that_goes_away_is_read_on(tmp_path):
    config = make_run(tmp_path, **ENDED)
    reader = RunReader(str(config.run.path))
    assert asyncio.run(reader.read()).step == 6
    config.run.path.rename(tmp_path / "away")
    assert asyncio.run(reader.read()).step is None


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Terminal]]:
    config = make_run(tmp_path, **ENDED)
    started: list[Terminal] = []

    def open_top() -> Terminal:
        started.append(Terminal([STREAMRL, "top", str(config.run.path)]))
        started[-1].until(lambda text: "stopped at step 6" in text)
        return started[-1]

    yield open_top
    for terminal in started:
        terminal.kill()


def test_q_leaves_the_terminal_as_it_was(opened):
    terminal = opened()
    within = terminal.modes
    terminal.resize(50, 150)
    terminal.until(lambda text: any("─" * 140 in row or "╮╭" in row for row in text.split("\r\n")))
    terminal.press("x")
    terminal.press("q")
    assert terminal.end() == 0
    assert is_put_back(terminal.output)
    assert terminal.modes != within, "echo and lines are on again"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_the_terminal_as_it_was(opened, number, code):
    terminal = opened()
    within = terminal.modes
    os.kill(terminal.pid, number)
    assert terminal.end() == code
    assert is_put_back(terminal.output)
    assert terminal.modes != within


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(opened):
    terminal = opened()
    within = terminal.modes
    terminal.press("\x1a")
    terminal.until_stopped()
    assert terminal.output.rstrip().endswith(LEFT) or is_put_back(terminal.output)
    assert terminal.modes != within
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.until(lambda text: "stopped at step 6" in text)
    assert terminal.modes == within
    terminal.press("q")
    assert terminal.end() == 0
