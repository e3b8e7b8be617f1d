"""What the displays of a run say is labeled, and the same in view, summary and report."""

import errno
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from streamrl.cli import report as report_command
from streamrl.cli.display.numbers import held_out_rows, rate, steps_s, summary
from streamrl.cli.display.view import headline, means, notes, render
from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.diagnosis import Reading, diagnose
from streamrl.diagnosis.causes import failed_groups
from streamrl.metrics import books_metrics
from streamrl.samples.files import SampleFile
from streamrl.tracking.jsonl import JsonlTracker, read_metrics
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    FailedRow,
    GeneratorStatus,
    GroupFailure,
    LearnerActivity,
    LearnerStatus,
    OverduePolicy,
    replace,
)
from tests.records import make_sample
from tests.unit.test_cli import QUICKSTART, printed

LAST = "the last one, prompt 18: reward r.py:score: ValueError: no"
FAILURES = f"13 of 19 groups up to version 3 failed; {LAST}"
# When a report is made that is 0 s old however slow the machine is.
AHEAD_S = 4e9


def make_run(folder: Path, *, num_steps: int = 6, **learner: object) -> RunConfig:
    """The folder of a run that was resumed after step 3, an hour later."""
    config = load_config(QUICKSTART, [f"run.folder={folder}", "run.name=run"], {}).config
    tracker = JsonlTracker(config.run.path / "metrics.jsonl", first_step=1)
    for step in range(1, num_steps + 1):
        line = {
            "time_s": step * 0.5 + 3600.0 * (step > 3),
            "reward/mean": step / 10,
            "learner/step_s": 0.5,
            "generator/tokens_per_s": 100.0 if step > 1 else 40.0,
        }
        tracker.log(line, step)
    tracker.close()
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    # By the launch, before all reports.
    os.utime(config.run.path / "config.yaml", (0, 0))
    known = {"policy_version": num_steps, "learner_term": 1, "activity": LearnerActivity.COMPUTING}
    status = LearnerStatus(**{**known, "activity_s": 0.0, "time_s": time.time(), **learner})
    content = json.dumps(msgspec.to_builtins(status, str_keys=True))
    (config.run.path / "learner.json").write_text(content)
    return config


def shown(config: RunConfig) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(summary(config))
    return capture.get()


def test_the_summary_of_a_run_whose_folder_is_read_only_is_printed(tmp_path, capsys, monkeypatch):
    def refused(path: Path, content: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    config = make_run(tmp_path)
    monkeypatch.setattr(report_command, "write_file", refused)
    assert main(["report", str(config.run.path)]) == 1
    printed = capsys.readouterr()
    assert "time of the steps" in printed.out
    assert "report.html: Read-only file system" in printed.err


def test_the_report_counts_the_time_of_the_steps_as_the_summary_does(tmp_path, capsys):
    config = make_run(tmp_path)
    assert "time of the steps" in shown(config)
    assert "3.0 s" in shown(config)
    assert main(["report", str(config.run.path)]) == 0
    report = capsys.readouterr().out
    (line,) = (line for line in report.splitlines() if "time of the steps" in line)
    assert line.split("│")[2].strip() == "3.0 s"
    assert "wall time" not in report


def test_a_run_is_read_from_where_its_folder_is(tmp_path, capsys, monkeypatch):
    """A folder that was moved, or is read from another directory, is the run that it holds."""
    config = make_run(tmp_path)
    moved = tmp_path / "elsewhere" / "run.20260101-120000"
    moved.parent.mkdir()
    config.run.path.rename(moved)
    for target in (str(moved), str(moved / "config.yaml")):
        assert main(["status", target]) == 1
        assert "run.20260101-120000: step 6 of 550" in capsys.readouterr().out
    monkeypatch.chdir(moved)
    assert main(["report", "."]) == 0
    assert "6 " in next(n for n in capsys.readouterr().out.splitlines() if "steps  " in n)


def test_rewards_are_labeled_alike_in_every_display(tmp_path, capsys):
    config = make_run(tmp_path)
    evaluation = {"greedy_reward_mean": 0.336, "num_prompts": 256}
    (config.run.path / "evaluation.json").write_text(json.dumps(evaluation))
    change = "0.150 -> 0.550 (mean of the first 2 and the last 2 steps)"
    held_out = "0.336 (greedy, 256 prompts)"
    assert held_out_rows(config) == [("held-out reward", held_out)]
    held_out = "0.336 (greedy, 256 prompts, 2 failed)"
    for model, of in (("run/checkpoints/step-00000040", "version 40"), ("models/m", "models/m")):
        (config.run.path / "evaluation.json").write_text(json.dumps({**evaluation, "model": model}))
        assert held_out_rows(config)[0][1] == f"0.336 (greedy, 256 prompts; {of})"
    (config.run.path / "evaluation.json").write_text(json.dumps({**evaluation, "num_failed": 2}))
    lines = [json.loads(t) for t in (config.run.path / "metrics.jsonl").read_text().splitlines()]
    assert headline(config, lines).startswith(
        "step 6/550  training reward 0.550 (mean of the last 2 steps)"
    )
    view = [" ".join(text.split()) for text in printed(render(config, lines, {}))]
    assert f"training reward {change}" in view
    assert f"held-out reward {held_out}" in view
    assert change in shown(config)
    assert held_out in shown(config)
    main(["status", str(config.run.path), "--json"])
    assert json.loads(capsys.readouterr().out)["evaluation"] == {**evaluation, "num_failed": 2}
    main(["status", str(config.run.path)])
    text = capsys.readouterr().out
    assert "step 6 of 550, training reward 0.550 (mean of the last 2 steps)" in text
    recent = next(line for line in text.splitlines() if line.startswith("steps "))
    assert recent.split(maxsplit=1)[1] in headline(config, lines)
    main(["status", str(config.run.path), "--json"])
    assert json.loads(capsys.readouterr().out)["training_reward"] == pytest.approx(0.55)
    assert not [n for n in view if "reward" in n and not n.startswith(("training", "held-out"))]


def test_rates_count_time_and_not_steps():
    lines = [
        {"step": 1, "learner/step_s": 9.0, "generator/tokens_per_s": 100.0},
        {"step": 2, "learner/step_s": 1.0, "generator/tokens_per_s": 1100.0},
        {"step": 3, "learner/step_s": 5.0, "generator/tokens_per_s": None},
    ]
    assert rate(lines, "generator/tokens_per_s") == 200.0
    assert rate(lines[2:], "generator/tokens_per_s") is None
    assert rate([], "generator/tokens_per_s") is None
    assert steps_s(lines) == 15.0
    assert "200 generated tokens/s" in means(lines)
    assert list(means(lines[2:])) == [], "what was not measured is not 0"


@pytest.mark.parametrize(("max_steps", "eta"), [(8, "ETA 1.0 s"), (6, ""), (3, "")])
def test_nothing_is_expected_of_a_run_that_has_made_its_steps(tmp_path, max_steps, eta):
    config = make_run(tmp_path)
    run = config.run.model_copy(update={"max_steps": max_steps})
    lines = [{"step": 6, "learner/step_s": 0.5}]
    line = headline(config.model_copy(update={"run": run}), lines)
    assert eta in line
    assert ("ETA" in line) == bool(eta)


def test_what_an_earlier_launch_reported_is_no_note_of_this_one(tmp_path):
    silent_s = time.time() - 3600.0
    config = make_run(tmp_path, time_s=silent_s, failures="1 of 9 groups failed")
    assert notes(config.run.path) == [
        "the learner has not reported for 60 min; its last report: computes",
        "1 of 9 groups failed",
    ]
    os.utime(config.run.path / "config.yaml")
    assert notes(config.run.path) == []


def failing(*generators: GeneratorStatus, failed: int, trained: int) -> BufferStats:
    dropped = {DropReason.FAILED: failed, DropReason.EXPIRED: 4} if failed else {}
    books = Books(granted=99, acknowledged=trained, dropped=dropped, learner_term=1)
    return BufferStats(
        incarnation="i",
        policy_version=3,
        groups_per_step=4,
        max_staleness=1,
        staleness_bound=1,
        overdue=OverduePolicy.WAIT,
        books=books,
        generators=generators,
        heartbeat_ages_s=(0.5,) * len(generators),
    )


def failed(generator_id: str, prompt_index: int, sentence: str, **rows: int) -> GeneratorStatus:
    return GeneratorStatus(
        generator_id=generator_id,
        session="s",
        policy_version=3,
        last_failure=GroupFailure(prompt_index=prompt_index, sentence=sentence),
        failed_rows=tuple(FailedRow(row=row, num_failures=n) for row, n in rows.items()),
    )


OLD = failed("g1", 7, "old", a=1, b=2)
NEW = failed("g0", 18, "reward r.py:score: ValueError: no")


def test_failures_are_a_sentence_with_the_newest_error_and_the_rows_that_fail_again():
    assert failed_groups(failing(failed=0, trained=6)) == ""
    assert failed_groups(failing(OLD, NEW, failed=13, trained=6)) == f"{FAILURES}; b failed 2 times"
    again = replace(NEW, failed_rows=(FailedRow(row="a", num_failures=3),))
    sentence = failed_groups(failing(OLD, again, failed=13, trained=6))
    assert sentence.endswith("; a failed 4 times; b failed 2 times")
    assert failed_groups(failing(failed=2, trained=6)) == "2 of 8 groups up to version 3 failed"


def test_groups_that_were_malformed_come_first_and_are_a_finding():
    stats = failing(NEW, failed=2, trained=4)
    dropped = {**stats.books.dropped, DropReason.MALFORMED: 18}
    stats = replace(stats, books=replace(stats.books, dropped=dropped))
    malformed, _, failures = failed_groups(stats).partition("; ")
    assert malformed.startswith(
        "18 of 24 groups up to version 3 were refused as malformed (see quarantine/"
    )
    assert failures.startswith("2 of 24 groups up to version 3 failed; the last one, prompt 18")
    only = replace(stats, books=replace(stats.books, dropped={DropReason.MALFORMED: 18}))
    assert failed_groups(only).startswith(
        "18 of 22 groups up to version 3 were refused as malformed"
    )
    (finding,) = diagnose(Reading(stall_s=300.0, stats=only, learner=COMPUTING))
    assert finding.sentence == failed_groups(only)


COMPUTING = LearnerStatus(
    policy_version=3,
    learner_term=1,
    activity=LearnerActivity.COMPUTING,
    activity_s=0.1,
    time_s=0.0,
)


@pytest.mark.parametrize(("num_failed", "num_trained"), [(13, 6), (1, 19), (50, 0)])
def test_groups_that_fail_are_a_finding_of_a_run_that_goes_on(num_failed, num_trained):
    stats = failing(NEW, failed=num_failed, trained=num_trained)
    (finding,) = diagnose(Reading(stall_s=300.0, stats=stats, learner=COMPUTING))
    assert finding.cause == "groups_failed"
    assert finding.sentence == failed_groups(stats)
    metrics = books_metrics(stats.books)
    share = num_failed / (num_failed + num_trained)
    assert metrics["buffer/failed_groups_frac"] == pytest.approx(share)


def test_a_few_bad_rows_are_no_finding():
    stats = failing(NEW, failed=1, trained=20)
    assert diagnose(Reading(stall_s=300.0, stats=stats)) == ()


def test_failures_are_on_every_screen(tmp_path, capsys):
    config = make_run(tmp_path, failures=FAILURES, activity=LearnerActivity.ENDED)
    assert FAILURES in printed(render(config, [], {}))
    assert FAILURES in shown(config)
    assert main(["status", str(config.run.path)]) == 0
    assert FAILURES in capsys.readouterr().out
    main(["status", str(config.run.path), "--json"])
    assert json.loads(capsys.readouterr().out)["failures"] == FAILURES


@pytest.mark.parametrize("command", ["report", "status"])
def test_what_a_reply_holds_is_shown_as_text(tmp_path, capsys, command):
    failures = "1 of 9 groups failed: [/INST] [red] \x1b]0;title\x07"
    config = make_run(tmp_path, failures=failures, activity=LearnerActivity.ENDED)
    main([command, str(config.run.path)])
    shown_text = capsys.readouterr().out
    assert "[/INST] [red] \\x1b]0;title\\x07" in " ".join(shown_text.split())
    assert "\x1b]" not in shown_text


def test_the_live_screens_show_no_escapes_of_a_reply(tmp_path):
    config = make_run(tmp_path, failures="1 of 9 groups failed: [/INST] \x1b]0;title\x07 \x1b[2J")
    for text in ("\n".join(printed(render(config, [], {}))), shown(config)):
        assert "[/INST] \\x1b]0;title\\x07 \\x1b[2J" in " ".join(text.split())
        assert "\x1b]" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize("num_processes", [1, 5, 18, 60])
def test_the_live_view_fits_the_terminal_and_counts_the_rows_for_which_it_has_no_room(
    tmp_path, width, height, num_processes
):
    config = make_run(tmp_path, num_steps=60)
    SampleFile(config.run.path, 1, 10**6).append([make_sample(60, 1.0, "12", prompt="a " * 4000)])
    lines = read_metrics(config.run.path / "metrics.jsonl")
    view = render(config, lines, {f"generator-{i}": "running" for i in range(num_processes)})

    def rows(console: Console) -> list[str]:
        with console.capture() as capture:
            console.print(view)
        return capture.get().splitlines()

    shown = rows(Console(width=width, height=height, force_terminal=True, color_system=None))
    all_rows = rows(Console(width=width, force_terminal=False))
    assert len(shown) < height
    assert max(map(len, shown)) <= width
    assert shown[0] == shown[0].rstrip()
    assert [row[0] for row in all_rows if row[0] in "╭╰"] == ["╭", "╰"]
    if len(shown) < len(all_rows):
        assert len(shown) == height - 1
        assert shown.pop() == f"{len(all_rows) - len(shown)} more rows"
    assert [row.rstrip() for row in shown] == [row.rstrip() for row in all_rows][: len(shown)]
