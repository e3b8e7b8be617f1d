"""A run whose buffer strangers flood: it ends, and its books close."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from buffers.audit import audit_journal
from buffers.journal.sqlite import journal_path
from buffers.zmq.server import MAX_MALFORMED, WINDOW_S
from tests.ports import free_port
from tests.system.conftest import DEADLINE_S, Launched
from tests.system.test_launch import assert_books_close

FLOOD = Path(__file__).parents[1] / "benchmarks" / "flood.py"


@contextmanager
def flood(url: str, kind: str) -> Iterator[None]:
    command = [sys.executable, str(FLOOD), url, kind]
    process = subprocess.Popen(command, cwd=FLOOD.parents[2], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "flooding\n"
        yield
        assert process.poll() is None, "the flood ended before the run"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_run_under_flood_ends_and_its_books_close(launch: Callable[..., Launched]):
    url = f"zmq://127.0.0.1:{free_port()}"
    with ExitStack() as floods:
        # They connect as soon as the buffer listens.
        for kind in ("malformed", "nested", "refused"):
            floods.enter_context(flood(url, kind))
        run = launch("--set", f"buffer.url={url}", "--set", "run.max_steps=6")
        assert run.end() == 0, run.output
    assert run.lines[-1]["buffer/refused_ignored"] > 0
    assert [line["step"] for line in run.lines] == list(range(1, 7))
    assert audit_journal(journal_path(run.folder)).faults == ()
    assert_books_close(run)
    # The files and the lines about it are few, however many messages came.
    assert len(list((run.folder / "quarantine").iterdir())) <= 100
    assert run.log("buffer").count("malformed") < MAX_MALFORMED * (2 + DEADLINE_S / WINDOW_S)
