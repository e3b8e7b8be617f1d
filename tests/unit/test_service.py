"""A daemon ends the way its supervisor can understand."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from streamrl import service, shutdown
from streamrl.config import RunConfig
from streamrl.errors import (
    ConfigError,
    ErrorRecord,
    FencedError,
    LedgerError,
    RolloutError,
    TransportError,
)
from streamrl.run_folder import config_of
from streamrl.shutdown import Shutdown
from streamrl.user_code import attributed_to, load_user_code


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A daemon's process ends with what it made of its signals; this one goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make_config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"folder": tmp_path}, "model": {"path": "m"}, "data": {"source": "addition"}}
    )


def run(tmp_path: Path, main) -> tuple[int, str]:
    code = service.run(main, role="test", config=make_config(tmp_path))
    return code, (tmp_path / "default" / "logs" / "test.log").read_text()


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (None, 0, "test: done"),
        (ConfigError("run.x: is wrong"), 2, "run.x: is wrong"),
        (FencedError("term 2 took over"), 3, "term 2 took over"),
        (RolloutError("reward r.py:score: no luck"), 4, "reward r.py:score: no luck"),
        (TransportError("the buffer is silent"), 5, "the buffer is silent"),
        (ModuleNotFoundError("No module named 'flash_attn'"), 2, "No module named 'flash_attn'"),
        (ValueError("oops"), 1, "ValueError: oops"),
    ],
)
def test_the_exit_code_says_what_to_do(tmp_path, error, code, sentence):
    async def main(shutdown: Shutdown) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(0 if error is None else 60))
            if error:
                raise error

    assert run(tmp_path, main)[0] == code
    log = (tmp_path / "default" / "logs" / "test.log").read_text()
    assert sentence in log
    assert ("Traceback" in log) is (code == 1)


@pytest.mark.parametrize(
    ("errors", "sentence", "code"),
    [
        ((TransportError("silent"), ConfigError("run.x: is wrong")), "run.x: is wrong", 2),
        ((TransportError("silent"), RolloutError("no luck")), "no luck", 4),
        ((TransportError("silent"), ValueError("oops")), "ValueError: oops (test_service.py:", 1),
        ((TransportError("silent"), LedgerError("unknown")), "silent", 5),
    ],
)
def test_the_supervisor_gets_the_reason_that_says_most_in_one_line(
    tmp_path, monkeypatch, errors, sentence, code
):
    monkeypatch.setenv("STREAMRL_PARENT_PID", str(os.getppid()))
    monkeypatch.setenv("STREAMRL_ERROR_FILE", str(tmp_path / "record"))

    async def fail(error: Exception) -> None:
        raise error

    async def main(shutdown: Shutdown) -> None:
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(fail(error))

    assert run(tmp_path, main)[0] == code
    record = msgspec.json.decode((tmp_path / "record").read_bytes(), type=ErrorRecord)
    assert record.exit_code == code
    assert record.sentence.startswith(sentence)


USER_CODE = """def score(episode):
    return helper(episode)

def helper(episode):
    return episode['label']
"""


def test_a_users_traceback_is_in_the_log_and_not_on_the_terminal(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(USER_CODE)
    score = load_user_code("data.reward", f"{tmp_path}/mine.py:score")

    async def main(shutdown: Shutdown) -> None:
        with attributed_to("reward mine.py:score", RolloutError):
            score({})

    code, log = run(tmp_path, main)
    terminal = capfd.readouterr().err
    sentence = "reward mine.py:score: KeyError: 'label' (mine.py:5)"
    assert code == 4
    assert terminal.endswith(f"{sentence}\n")
    assert "Traceback" not in terminal
    assert sentence in log
    assert 'mine.py", line 2, in score' in log
    assert "service.py" not in log


@pytest.mark.parametrize(
    ("address", "kind"),
    [("tcp://127.0.0.1:{port}", TransportError), ("tcp://192.0.2.1:{port}", ConfigError)],
)
def test_an_address_that_cannot_be_bound_is_named_with_its_setting(address, kind):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as one:
        port = one.bind_to_random_port("tcp://127.0.0.1")
        place = address.format(port=port)
        with (
            context.socket(zmq.ROUTER) as other,
            pytest.raises(kind, match=f"^buffer.url: cannot listen at {place}"),
            service.binding("buffer.url", place),
        ):
            other.bind(place)


def test_the_first_signal_asks_to_drain(tmp_path):
    async def main(shutdown: Shutdown) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(shutdown.requested.wait(), 120)

    code, log = run(tmp_path, main)
    assert code == 0
    assert "SIGTERM: draining; a second one stops at once" in log


def test_a_daemon_drains_when_its_launcher_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMRL_PARENT_PID", str(os.getppid() + 1))

    async def main(shutdown: Shutdown) -> None:
        await asyncio.wait_for(shutdown.requested.wait(), 120)

    code, log = run(tmp_path, main)
    assert (code, "the launcher has ended" in log) == (0, True)


def test_the_folder_has_the_settings_that_the_learner_was_last_started_with(tmp_path, monkeypatch):
    monkeypatch.delenv("STREAMRL_PARENT_PID", raising=False)

    async def learn(shutdown):
        service.keep_settings(config)

    for max_steps in (60, 400):
        config = make_config(tmp_path).with_values(run={"max_steps": max_steps, "resume": "auto"})
        assert service.run(learn, role="learner", config=config) == 0
        kept = config_of(config.run.path).run
        assert (kept.max_steps, kept.resume) == (max_steps, "never")
    # A launch has written what it has decided, which its learner is told in part by options.
    monkeypatch.setenv("STREAMRL_PARENT_PID", "1")
    service.keep_settings(make_config(tmp_path))
    assert config_of(config.run.path).run.max_steps == 400


def test_a_signal_that_comes_when_the_work_is_over_does_not_change_the_exit_code(tmp_path):
    child = os.fork()
    if child == 0:

        async def main(shutdown: Shutdown) -> None:
            raise FencedError("another one took over")

        code = service.run(main, role="test", config=make_config(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize(("variable", "code"), [("RANK", 0), ("OTHER", 1)])
def test_an_order_that_reaches_a_rank_twice_counts_once(tmp_path, monkeypatch, variable, code):
    """Slurm signals torchrun and its ranks, and torchrun its ranks."""
    monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(shutdown, "FORWARDED_S", 600.0)
    child = os.fork()
    if child == 0:

        async def main(shutdown: Shutdown) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await shutdown.requested.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)

        os._exit(service.run(main, role="test", config=make_config(tmp_path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_the_second_signal_stops_at_once(tmp_path):
    child = os.fork()
    if child == 0:

        async def main(shutdown: Shutdown) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await shutdown.requested.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(600)

        service.run(main, role="test", config=make_config(tmp_path))
        os._exit(99)
    start = time.monotonic()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert time.monotonic() - start < 300
