"""What a stranger does to the command line ends in one sentence and an exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.cli.display.view import LinePrinter
from streamrl.cli.main import EXIT_BROKEN_PIPE, main
from streamrl.run_folder import read_books, read_json, read_learner
from streamrl.types import LearnerActivity
from tests.unit.test_cli import QUICKSTART
from tests.unit.test_displays import AHEAD_S, make_run

STREAMRL = [sys.executable, "-m", "streamrl.cli.main"]


@pytest.mark.parametrize("content", ["[1]", "3", "{bad", "", "null", '{"a": 1}', "\x00"])
def test_damaged_files_of_a_run_are_as_none(tmp_path, capsys, content):
    config = make_run(tmp_path)
    for name in ("learner.json", "books.json", "evaluation.json", "metrics.jsonl"):
        (config.run.path / name).write_text(content)
    assert read_learner(config.run.path) is None
    assert read_json(config.run.path / "books.json") in ({}, {"a": 1})
    read_books(config.run.path)
    assert main(["report", str(config.run.path)]) == 0
    assert main(["status", str(config.run.path)]) == 1
    assert "nothing listens at" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["status", "--follow"], ["report"], ["buffer", "audit"], ["status"]]
)
def test_a_run_is_named_by_its_folder_or_by_its_configuration(tmp_path, capsys, command):
    ended = {"activity": LearnerActivity.ENDED, "time_s": time.time() - 9000.0}
    config = make_run(tmp_path, **ended, policy_version=550)
    outputs = []
    for target in (config.run.path, config.run.path / "config.yaml"):
        main([*command, str(target)])
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    assert main([*command, str(tmp_path)]) == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-3", "nan", "inf", "soon"])
@pytest.mark.parametrize(
    "command",
    [
        ["buffer", "drain", "zmq://127.0.0.1:1", "--deadline"],
        ["generators", "drain", "zmq://127.0.0.1:1", "g", "--deadline"],
        ["buffer", "inspect", "zmq://127.0.0.1:1", "--interval"],
    ],
)
def test_a_time_that_cannot_be_waited_for_is_refused_before_anything_happens(
    capsys, command, value
):
    with pytest.raises(SystemExit) as ended:
        main([*command, value])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {command[-1]}: was {value!r}; it must be a number of seconds, 0 or" in error


@pytest.mark.parametrize(
    "url", ["zmq://", "zmq://host", "zmq://host:0", "zmq://h:99999", "zmq://h:x"]
)
@pytest.mark.parametrize("command", [["status"], ["generators"], ["buffer", "inspect"]])
def test_an_address_that_cannot_be_is_refused(capsys, command, url):
    assert main([*command, url]) == 2
    assert f"{url}: must be zmq://host:port, with a port from 1" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["keys", "new", str(tmp_path / "file" / "keys")]) == 1
    assert f"{tmp_path / 'file' / 'keys'}: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "plan", "status"], ids=str)
def test_a_reader_that_has_gone_ends_a_command_quietly(tmp_path, command):
    """Also where rich writes."""
    (tmp_path / "config.yaml").write_text(Path(QUICKSTART).read_text())
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [*STREAMRL, command, str(tmp_path) if command == "status" else QUICKSTART],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == EXIT_BROKEN_PIPE


def test_a_full_disk_under_the_output_is_a_sentence():
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*STREAMRL, "check", QUICKSTART], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.stderr == "streamrl check: the output: No space left on device\n"
    assert process.returncode == 1


def test_follow_prints_lines_into_a_pipe_and_ends_with_its_run(tmp_path, capsys):
    config = make_run(tmp_path, activity=LearnerActivity.ENDED, policy_version=6, time_s=AHEAD_S)
    assert main(["status", "--follow", str(config.run.path)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 6/550  training reward 0.550 (mean of the last 2 steps)")
    assert last == "stopped at step 6 of 550, 0 s ago"


def test_follow_of_a_learner_that_fell_silent_says_so_until_ctrl_c(tmp_path):
    config = make_run(tmp_path, time_s=time.time() - 300.0)
    process = subprocess.Popen(
        [*STREAMRL, "status", "--follow", "--lines", str(config.run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 6/550")
    sentence = "the learner has not reported for 5 min; its last report: computes"
    assert process.stdout.readline().strip() == sentence
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 130


def test_lines_for_a_log_are_printed_once(tmp_path):
    from rich.console import Console

    config = make_run(tmp_path, failures="1 of 9 groups failed")
    console = Console(width=30, record=True, force_terminal=False)
    printer = LinePrinter(config, console)
    for _ in range(3):
        printer.print_if_due()
        printer.print_now()
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1"]
    assert len(lines[0]) > 30, "a line of a log is not wrapped"


def test_a_sentence_of_which_a_number_alone_is_new_is_said_once_a_minute(tmp_path, monkeypatch):
    from rich.console import Console

    console = Console(record=True, force_terminal=False)
    printer = LinePrinter(make_run(tmp_path), console)
    for now_s, waits_for in (
        (5.0, "no generator reports, for 7 s"),
        (10.0, "no generator reports, for 12 s"),
        (70.0, "no generator reports, for 72 s"),
        (75.0, "none of 2 generators asks"),
        (80.0, "no generator reports, for 2 s"),
    ):
        make_run(tmp_path, waits_for=waits_for)
        monkeypatch.setattr("streamrl.cli.display.view.time.monotonic", lambda now_s=now_s: now_s)
        printer.print_now()
    said = console.export_text().splitlines()[1:]
    assert [line.removeprefix("no generator reports, for ") for line in said] == [
        "7 s",
        "72 s",
        "none of 2 generators asks",
        "2 s",
    ]


def test_before_the_first_step_a_log_has_what_the_learner_waits_for(tmp_path):
    from rich.console import Console

    config = make_run(tmp_path, waits_for="no generator reports")
    (config.run.path / "metrics.jsonl").unlink()
    console = Console(record=True, force_terminal=False)
    LinePrinter(config, console).print_if_due()
    assert console.export_text() == "no generator reports\n"
