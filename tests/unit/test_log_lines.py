"""Every line of a log in JSON is one object, whoever wrote it."""

import io
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from streamrl.log_lines import FORMAT_VARIABLE, LineWriter

STREAMRL = str(Path(sys.executable).with_name("streamrl"))

DAEMON = """
import logging, sys, threading, warnings
from streamrl import service
from streamrl.config import RunConfig

config = RunConfig.model_validate({
    "run": {"folder": sys.argv[1], "log_format": "json"},
    "model": {"path": "m"}, "data": {"source": "addition"},
})

async def main(shutdown):
    logging.getLogger("mine").warning("two\\nlines of %s", "text")
    print("printed\\rbar", end="")
    print(" on")
    sys.stderr.write("half a line")
    warnings.warn("old")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start(); thread.join()
    try:
        raise KeyError("caught")
    except KeyError:
        logging.getLogger("mine").exception("logged")
    if len(sys.argv) > 2:
        raise ValueError("no luck")

code = service.run(main, role="generator-7", config=config)
print("after")
raise RuntimeError("at the end")
"""


def run_daemon(folder: Path, *arguments: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", DAEMON, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_long_text_without_a_line_end_stays_in_its_order():
    written = io.StringIO()
    writer = LineWriter(written, "learner", "stdout")
    writer.write("a" * 70_000)
    writer.write("b" * 70_000)
    writer.finish()
    messages = [json.loads(line)["message"] for line in written.getvalue().splitlines()]
    assert "".join(messages) == "a" * 70_000 + "b" * 70_000
    assert max(map(len, messages)) <= 2**16


def test_a_library_finds_no_terminal_and_cannot_close_the_stream(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    writer = LineWriter(written, "learner", "stdout")
    assert isinstance(writer, io.TextIOBase)
    assert not writer.isatty()
    writer.close()
    writer.write("more\n")
    assert json.loads(written.getvalue())["message"] == "more"


def test_all_that_a_daemon_writes_is_json(tmp_path):
    lines = run_daemon(tmp_path)
    assert all({"time", "level", "role", "pid", "logger", "message"} <= set(n) for n in lines)
    assert {line["role"] for line in lines} == {"generator-7"}
    assert len({line["pid"] for line in lines}) == 1
    assert all(datetime.fromisoformat(str(line["time"])).tzinfo for line in lines)
    said = {str(line["message"]): line for line in lines}
    assert said["two\nlines of text"]["level"] == "warning"
    assert said["two\nlines of text"]["logger"] == "mine"
    assert said["printed"]["logger"] == "stdout"
    assert "bar on" in said
    assert said["ZeroDivisionError: division by zero"]["level"] == "critical"
    assert said["half a line"]["logger"] == "stderr"
    assert "KeyError: 'caught'" in str(said["logged"]["exception"])
    assert any(line["logger"] == "py.warnings" for line in lines)
    uncaught = said["RuntimeError: at the end"]
    assert uncaught["logger"] == "uncaught"
    assert str(uncaught["exception"]).startswith("Traceback (most recent call last):")
    assert "exception" not in said["printed"]


def test_a_crash_is_one_object_with_its_traceback_on_the_terminal_and_in_the_log(tmp_path):
    printed = run_daemon(tmp_path, "crash")
    logged = (tmp_path / "default" / "logs" / "generator-7.log").read_text().splitlines()
    for lines in (printed, [json.loads(line) for line in logged]):
        (crash,) = (line for line in lines if line["message"] == "crashed: no luck")
        assert crash["level"] == "critical"
        assert "ValueError: no luck" in str(crash["exception"])


@pytest.mark.parametrize("command", ["generator", "learner", "buffer", "validator"])
def test_a_daemon_that_fails_before_its_log_begins_says_so_in_json(tmp_path, command):
    """The launcher sets the variable; the configuration cannot be read."""
    done = subprocess.run(
        [STREAMRL, command, str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, FORMAT_VARIABLE: "json"},
    )
    assert done.returncode == 2
    (line,) = (json.loads(text) for text in done.stderr.splitlines())
    assert "none.yaml" in line["message"]
    assert line["role"] == command


def test_other_commands_stay_for_people(tmp_path):
    done = subprocess.run(
        [STREAMRL, "status", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, FORMAT_VARIABLE: "json"},
    )
    assert done.stderr.startswith("streamrl status: ")
