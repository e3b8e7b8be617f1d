"""A daemon ends within its time after a signal, whatever state it is in; each is a process."""

# ruff: noqa: ASYNC222, ASYNC251, SIM105

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from streamrl import service, shutdown
from streamrl.errors import ErrorRecord, FencedError
from streamrl.shutdown import Orders, Shutdown
from tests.unit.test_service import make_config

NEVER_S = 3600.0
Main = Callable[[Shutdown], Awaitable[None]]


def end_of(
    folder: Path, main: Main, monkeypatch: pytest.MonkeyPatch, force_s: float = NEVER_S
) -> tuple[int, str]:
    """Exit code and log of a daemon that does this; it is killed `force_s` after a first signal."""
    monkeypatch.setattr(service, "force_s", lambda _: force_s)
    monkeypatch.setattr(shutdown, "EXIT_S", 0.5)
    monkeypatch.setattr(shutdown, "EMPTY_HANDED_S", 0.5)
    child = os.fork()
    if child == 0:
        os._exit(service.run(main, role="test", config=make_config(folder)))
    _, status = os.waitpid(child, 0)
    log = (folder / "default" / "logs" / "test.log").read_text()
    return os.waitstatus_to_exitcode(status), log


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def blocked_loop(_: Shutdown) -> None:
    term()
    time.sleep(NEVER_S)


async def deaf(_: Shutdown) -> None:
    term()
    while True:
        await asyncio.sleep(0.01)


async def waiting(_: Shutdown) -> None:
    async def wait_for_nobody() -> None:
        await asyncio.sleep(NEVER_S)

    term()
    await wait_for_nobody()


async def deaf_to_its_launchers_end(ended: Shutdown) -> None:
    ended.ask("the launcher has ended")
    await asyncio.sleep(NEVER_S)


@pytest.mark.parametrize(
    ("main", "place"),
    [
        (blocked_loop, "(blocked_loop)"),
        (deaf, "(deaf)"),
        (waiting, "(wait_for_nobody)"),
        (deaf_to_its_launchers_end, "(deaf_to_its_launchers_end)"),
    ],
)
def test_what_does_not_end_is_ended_and_says_where_it_was(tmp_path, monkeypatch, main, place):
    monkeypatch.setenv("STREAMRL_PARENT_PID", str(os.getpid()))
    monkeypatch.setenv("STREAMRL_ERROR_FILE", str(tmp_path / "record"))
    code, log = end_of(tmp_path, main, monkeypatch, force_s=0.5)
    assert code == 1
    if main is not deaf:
        assert log.splitlines()[-1].endswith(place), log
    record = msgspec.json.decode((tmp_path / "record").read_bytes(), type=ErrorRecord)
    assert "ended by force after 0.5 s, in " in record.sentence


async def left_thread(_: Shutdown) -> None:
    call = asyncio.create_task(asyncio.to_thread(time.sleep, NEVER_S))
    await asyncio.sleep(0.05)
    call.cancel()


async def left_thread_and_failure(ending: Shutdown) -> None:
    await left_thread(ending)
    raise FencedError("another one took over")


async def left_task(_: Shutdown) -> None:
    async def hold_on() -> None:
        while True:
            try:
                await asyncio.sleep(NEVER_S)
            except asyncio.CancelledError:
                continue

    asyncio.create_task(hold_on())  # noqa: RUF006
    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("main", "code"), [(left_thread, 0), (left_thread_and_failure, 3), (left_task, 0)]
)
def test_what_is_left_of_the_work_does_not_keep_the_process(tmp_path, monkeypatch, main, code):
    assert end_of(tmp_path, main, monkeypatch)[0] == code


async def loading(ending: Shutdown) -> None:
    with ending.empty_handed():
        term()
        time.sleep(NEVER_S)


async def loading_what_hides_interrupts(ending: Shutdown) -> None:
    with ending.empty_handed():
        term()
        while True:
            try:
                time.sleep(NEVER_S)
            except BaseException:
                continue


async def about_to_load(ending: Shutdown) -> None:
    term()
    with ending.empty_handed():
        time.sleep(NEVER_S)


async def just_loaded(ending: Shutdown) -> None:
    with ending.empty_handed():
        try:
            term()
        except BaseException:
            pass
    time.sleep(NEVER_S)


@pytest.mark.parametrize(
    "main", [loading, loading_what_hides_interrupts, about_to_load, just_loaded]
)
def test_a_daemon_that_holds_nothing_yet_ends_at_once(tmp_path, monkeypatch, main):
    code, log = end_of(tmp_path, main, monkeypatch)
    assert code == 0
    assert "nothing is lost" in log
    assert ("test: done" in log) is ("stopped at the start" in log)


def test_the_first_signal_after_the_launchers_end_is_the_first(tmp_path, monkeypatch):
    async def main(ending: Shutdown) -> None:
        ending.ask("the launcher has ended")
        term()
        await asyncio.sleep(0.1)

    assert end_of(tmp_path, main, monkeypatch)[0] == 0


def test_a_second_signal_ends_a_daemon_whose_loop_is_blocked(tmp_path, monkeypatch):
    async def main(_: Shutdown) -> None:
        threading.Timer(0.1, term).start()
        term()
        time.sleep(NEVER_S)

    code, log = end_of(tmp_path, main, monkeypatch)
    assert code == 1
    assert "second SIGTERM: stopping at once" in log


def test_a_terminal_that_closes_is_one_signal_however_often_it_is_sent(tmp_path, monkeypatch):
    async def main(ending: Shutdown) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await ending.requested.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)

    code, log = end_of(tmp_path, main, monkeypatch)
    assert code == 0
    assert "SIGHUP: draining" in log


@pytest.mark.parametrize(
    ("names", "num_orders"),
    [
        ("HUP HUP TERM", 1),
        ("HUP TERM TERM", 2),
        ("HUP INT", 2),
        ("TERM HUP", 1),
        ("TERM HUP TERM", 2),
        ("INT INT", 2),
    ],
)
def test_what_ends_a_session_is_one_order(names: str, num_orders: int):
    orders = Orders()
    numbers = [signal.Signals[f"SIG{name}"] for name in names.split()]
    assert sum(map(orders.count, numbers)) == num_orders


def test_a_terminal_that_closes_leaves_what_nohup_started_alone(tmp_path, monkeypatch):
    async def main(ending: Shutdown) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        assert not ending.requested.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert end_of(tmp_path, main, monkeypatch)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_a_daemon_forks_tells_it_of_no_signal(tmp_path, monkeypatch):
    async def main(ending: Shutdown) -> None:
        child = os.fork()
        if child == 0:
            term()
            time.sleep(0.05)
            os._exit(0)
        os.waitpid(child, 0)
        await asyncio.sleep(0.1)
        assert not ending.requested.is_set()

    assert end_of(tmp_path, main, monkeypatch)[0] == 0
