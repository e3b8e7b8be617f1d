"""`streamrl status`, once and again and again: of any run, with whatever files it has."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from streamrl.cli.display.numbers import remaining, summary_rows, validation_text
from streamrl.cli.display.view import step_parts
from streamrl.cli.main import main
from streamrl.cli.status import RunStatus, _Followed
from streamrl.diagnosis import Reading
from streamrl.tracking.jsonl import VALIDATION_FILE, JsonlTracker
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    LearnerActivity,
    LearnerStatus,
    OverduePolicy,
)
from tests.terminal import Terminal, is_put_back
from tests.unit.test_displays import make_run

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
ENDED = {"activity": LearnerActivity.ENDED, "policy_version": 6}


def generator(number: int) -> GeneratorStatus:
    return GeneratorStatus(
        generator_id=f"generator-{number}",
        session=f"s{number}",
        policy_version=41,
        lease_ids=("a", "b"),
        lease_ages_s=(1.0, 9.5),
        tokens_per_s=1234.5,
        max_num_groups=4,
        busy_s=30.0,
        uptime_s=60.0,
        pause_s=3.0,
        kv_usage=0.42,
    )


def stats(num_generators: int) -> BufferStats:
    return BufferStats(
        incarnation="i",
        policy_version=42,
        groups_per_step=16,
        max_staleness=2,
        staleness_bound=2,
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
        "learner/forward_s": 0.6,
        "learner/backward_s": 0.8,
        "generator/tokens_per_s": 2500.0,
        "generator/count": 2,
        "buffer/staleness_mean": 1.5,
        "buffer/staleness_max": 2,
        "mismatch/rollout_is_eff_sample_size": 0.91,
        "scaling/steps_per_s": 0.5,
        "scaling/steps_per_s_generator_added": 0.6,
        "scaling/steps_per_s_rank_added": 0.5,
        "scaling/num_generators_wanted": 3,
        "scaling/rest_frac": 0.0,
        "generator/idle_frac": 0.1,
    }


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, width: int, num_generators: int) -> str:
    """The screen of a run of two generators that goes on, with 42 of 550 steps made."""
    config = make_run(folder)
    lines = [line(step) for step in range(1, 43)]
    text = "".join(json.dumps(made) + "\n" for made in lines)
    (config.run.path / "metrics.jsonl").write_text(text)
    learner = LearnerStatus(
        policy_version=42,
        learner_term=1,
        activity=LearnerActivity.COMPUTING,
        activity_s=0.5,
        time_s=0.0,
        failures="1 of 9 groups failed: \x1b]0;title\x07",
    )
    reading = Reading(
        stall_s=300.0, stats=stats(num_generators), learner=learner, max_steps=550, idle_s=1.0
    )

    async def read(_: object) -> RunStatus:
        return RunStatus("run", reading, (), config=config)

    monkeypatch.setattr("streamrl.cli.status.read_status", read)
    return drawn(_Followed(str(config.run.path)), width)


def drawn(followed: _Followed, width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(asyncio.run(followed.draw(width)))
    return capture.get()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("num_generators", [0, 2, 40])
def test_every_line_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, num_generators: int
):
    output = shown(tmp_path, monkeypatch, width, num_generators)
    assert max(cell_len(text) for text in output.splitlines()) <= width
    text = " ".join(output.split())
    assert "run: step 42 of 550" in text
    assert "2.00 s a step: backward 40 %, forward 30 %, wait 25 %, other 5 %" in text
    for part in ("staleness 1.50", "ESS 0.910", "the books close", "2,500 generated"):
        assert part in text
    # A run that nothing feeds has no end in sight.
    assert ("checkpoint 100 in 1:56, ETA 16:56" in text) is (num_generators > 0)
    assert ("another generator would raise 0.5 steps/s" in text) is (num_generators > 1)
    assert ("generator-1" in text) is (num_generators > 1)
    assert (" 42 %" in text) is (num_generators > 1)


def test_the_parts_of_a_step_are_those_that_were_measured():
    assert step_parts([]) == step_parts([{"step": 1}]) == ""
    assert step_parts([{"learner/step_s": 0.5}]) == "0.50 s a step: other 100 %"


def record(capsys: pytest.CaptureFixture[str], target: object) -> dict[str, Any]:
    main(["status", str(target), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ["metrics.jsonl", "learner.json", "books.json", "samples.jsonl"])
@pytest.mark.parametrize(
    "content",
    [b"\x00\xff\xfe", b"{", b"[1, 2]\n", b'{"step": "x", "reward/mean": "good"}\n', b""],
)
def test_a_damaged_file_is_left_out(tmp_path, capsys, name, content):
    config = make_run(tmp_path, **ENDED)
    (config.run.path / name).write_bytes(content)
    assert record(capsys, config.run.path)["run"] == "run"
    assert "run: " in drawn(_Followed(str(config.run.path)))


@pytest.mark.parametrize(
    "value", ['"fast"', "NaN", "Infinity", "1e999", "null", "[]", str(10**400)]
)
def test_a_metric_that_is_no_number_is_left_out(tmp_path, capsys, value):
    config = make_run(tmp_path, **ENDED)
    text = f'{{"step": 7, "reward/mean": {value}, "learner/step_s": {value}, "time_s": {value}}}\n'
    (config.run.path / "metrics.jsonl").write_text(text)
    found = record(capsys, config.run.path)
    assert (found["training_reward"], found["last_step_s"]) == (None, None)
    assert "run: step 7 of 550" in drawn(_Followed(str(config.run.path)))


def test_a_folder_whose_configuration_is_damaged_is_a_sentence(tmp_path, capsys):
    config = make_run(tmp_path, **ENDED)
    (config.run.path / "config.yaml").write_text("run: [")
    assert main(["status", str(config.run.path), "--follow"]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_url_that_nobody_answers_is_a_reading(capsys):
    found = record(capsys, "zmq://127.0.0.1:9")
    assert found["findings"][0]["cause"] == "buffer_unreachable"
    assert "! nothing listens at zmq://127.0.0.1:9" in drawn(_Followed("zmq://127.0.0.1:9"))
    capsys.readouterr()
    for options in (["--probe", "buffer"], ["--follow", "--lines"]):
        assert main(["status", "zmq://127.0.0.1:9", *options]) == 2
        assert "reads a run's folder: give that, or its config.yaml" in capsys.readouterr().err


def test_options_that_need_follow_say_so(tmp_path, capsys):
    config = make_run(tmp_path, **ENDED)
    assert main(["status", str(config.run.path), "--lines"]) == 2
    assert "--lines: is for --follow" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["status", str(config.run.path), "--follow", "--json"])
    assert "--json: not allowed with argument --follow" in capsys.readouterr().err


def test_a_folder_that_goes_away_is_read_on(tmp_path):
    config = make_run(tmp_path, **ENDED)
    followed = _Followed(str(config.run.path))
    asyncio.run(followed.draw(100))
    assert followed.has_ended
    config.run.path.rename(tmp_path / "away")
    assert "run: no step yet" in drawn(followed)
    assert not followed.has_ended


def test_a_run_that_has_ended_is_shown_once_and_stays(tmp_path):
    config = make_run(tmp_path, **ENDED)
    terminal = Terminal([STREAMRL, "status", str(config.run.path), "--follow"])
    try:
        terminal.until(lambda text: "stopped at step 6 of 550" in text)
        assert terminal.end() == 0
        assert is_put_back(terminal.output)
        assert "\x1b[?1049" not in terminal.output, "the last screen stays"
    finally:
        terminal.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path, number, code):
    config = make_run(tmp_path, time_s=time.time() - 300.0)
    terminal = Terminal([STREAMRL, "status", str(config.run.path), "--follow"])
    try:
        terminal.until(lambda text: "run: step 6 of 550" in text)
        os.kill(terminal.pid, number)
        assert terminal.end() == code
        assert is_put_back(terminal.output)
    finally:
        terminal.kill()


def test_a_view_left_open_shows_the_launch_that_goes_on(tmp_path):
    """With more steps, and a buffer at another port: not `step 41 of 40` of what it began with."""
    config = make_run(tmp_path)
    file = config.run.path / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("max_steps: 550", "max_steps: 40"))
    os.utime(file, (0, 0))
    followed = _Followed(str(config.run.path))
    assert "step 6 of 40" in drawn(followed)
    file.write_text(text.replace("max_steps: 550", "max_steps: 90").replace("29610", "29777"))
    os.utime(file, (time.time() + 60,) * 2)
    assert "step 6 of 90" in drawn(followed)
    assert followed._found.buffer.url == "zmq://127.0.0.1:29777"


def test_held_out_rewards_are_in_the_status_and_so_is_what_is_being_validated(tmp_path, capsys):
    """Also while the learner saves its last checkpoint."""
    validating = "version 6 is being validated: 12 of 20 prompts"
    config = make_run(tmp_path, activity=LearnerActivity.SAVING, validating=validating)
    for version, mean in ((0, 0.107), (3, 0.5), (5, 0.477)):
        metrics = {"validation/mean@1": mean, "validation/num_prompts": 20.0}
        tracker = JsonlTracker(config.run.path / VALIDATION_FILE, first_step=version)
        tracker.log(metrics, version)
        tracker.close()
    main(["status", str(config.run.path)])
    output = capsys.readouterr().out
    held_out = "0.107 -> 0.477 (greedy, 20 prompts; versions 0 and 5), best 0.500 of version 3"
    assert f"held-out reward {held_out}" in " ".join(output.split())
    assert f"held-out {validating}" in " ".join(output.split())
    curve = {"0": 0.107, "3": 0.5, "5": 0.477}
    assert record(capsys, config.run.path)["held_out"] == curve
    summary = dict(summary_rows(config, [{"step": 6}]))
    assert summary["held-out reward"] == held_out
    tracker = JsonlTracker(config.run.path / VALIDATION_FILE, first_step=6)
    tracker.log({"validation/mean@1": 0.5, "validation/num_prompts": 20.0}, 6)
    tracker.close()
    # As good as the best before it.
    assert validation_text(config) == "0.107 -> 0.500 (greedy, 20 prompts; versions 0 and 6)"


def test_what_is_to_come_is_the_next_checkpoint_and_the_end(tmp_path, capsys):
    lines = [line(step) for step in range(1, 43)]
    assert remaining(lines, 550, 100) == {"checkpoint 100": 116.0, "end": 1016.0}
    assert remaining(lines, 60, 100) == {"checkpoint 60": 36.0, "end": 36.0}
    assert remaining(lines, 42, 100) == remaining([], 42, 100) == {}
