"""Requests of an engine over HTTP, on a server that each test controls."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec import structs

from actors.engines import requests
from actors.engines.completions import completion
from actors.engines.model import ModelFacts
from actors.engines.served import http as http_module
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import (
    BrokenAnswerError,
    BusyError,
    ConnectionLostError,
    Http,
    RefusedError,
    SlowAnswerError,
    readings,
)
from actors.engines.served.open import probe, wait_until_up
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import (
    Check,
    ForeignWeightsError,
    Labels,
    ServedRequest,
    VersionSpan,
    versions_of,
)
from actors.engines.vllm.server import VllmServer, open_vllm
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams, WeightUpdate
from tests.engines import make_model, run_config
from tests.ports import free_port
from tests.standins.http_server import serve

ONE = SamplingParams(max_new_tokens=1)


def an_answer(logprob: float = -0.5) -> Completion:
    return completion([3], [logprob], np.zeros(1, np.int32), "stop")


def aborted(*token_ids: int) -> Completion:
    """The server's answer to a request that an update or an abort has ended."""
    count = len(token_ids)
    return completion(token_ids, [-0.5] * count, np.zeros(count, np.int32), "abort")


class FakeServer:
    """Answers each request with what `answers` has next; a load resolves `at_load` to an abort."""

    name = "Fake"

    def __init__(self, *answers: Completion | Exception | asyncio.Future) -> None:
        self._answers = list(answers)
        self.asked: list[ServedRequest] = []
        self.aborted: list[str] = []
        self.is_gone = False
        self.is_own = True
        self.labels = Labels("me")
        self.updates = self
        self.held = ""
        self.loaded: list[int] = []
        self.num_refusals = 0
        self.at_load: asyncio.Future[Completion] | None = None
        self.at_abort: asyncio.Future[Completion] | None = None

    async def sample(self, request: ServedRequest) -> Completion:
        self.asked.append(request)
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.at_abort is not None and len(self.aborted) > 1:
            self.at_abort.set_result(aborted(3, 4))

    async def label(self) -> str:
        return self.held or (self.labels.label(0) if self.is_own else "default")

    async def receive(self, update: WeightUpdate) -> None: ...

    async def load_in_pause(
        self, label: str, on_loaded: Callable[[], None], require_current: Check
    ) -> float:
        self.loaded.append(self.labels.version(label))
        require_current()
        if self.at_load is not None:
            self.at_load.set_result(aborted(3))
        on_loaded()
        return 0.25

    async def readings(self) -> Mapping[str, float]:
        if self.num_refusals:
            self.num_refusals -= 1
            raise RefusedError("/metrics", 503, "busy")
        if self.is_gone:
            raise ConnectionLostError("nobody there")
        return {"num_active": 1.0, "num_waiting": 2.0, "num_tokens": 30.0}

    async def close(self) -> None: ...


def engine_on(
    server: FakeServer,
    *,
    max_num_seqs: int = 4,
    retry_timeout_s: float = 5.0,
    keeps_old_kv: bool = False,
) -> ServedEngine:
    facts = ModelFacts(shapes={}, eos=frozenset([1]), vocab_size=10)
    return ServedEngine(
        server,
        facts,
        max_num_seqs=max_num_seqs,
        max_model_len=16,
        retry_timeout_s=retry_timeout_s,
        keeps_old_kv=keeps_old_kv,
    )


async def test_a_lost_connection_is_asked_again_under_another_id():
    server = FakeServer(ConnectionLostError("reset"), ConnectionLostError("reset"), an_answer())
    engine = engine_on(server)
    assert (await engine.generate([5], ONE)).token_ids.tolist() == [3]
    ids = [request.id for request in server.asked]
    assert len(set(ids)) == 3
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)
    await engine.close()
    assert server.aborted == ids[:2]


async def test_a_request_given_up_for_an_update_begins_anew():
    given_up: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    server = FakeServer(given_up, an_answer())
    server.at_load = given_up
    engine = engine_on(server)
    running = asyncio.create_task(engine.generate([5], ONE))
    async with asyncio.timeout(120):
        while not server.asked:
            await asyncio.sleep(0)
    update = WeightUpdate(policy_version=7, learner_id="h", manifest=(), endpoint=None, key=b"")  # type: ignore[arg-type]
    assert (await engine.load_weights(update)).pause_s == 0.25
    assert (await running).finish_reason == FinishReason.STOP
    first, again = [request.cache_salt for request in server.asked]
    assert first != again
    assert engine.policy_version == 7
    await engine.close()


async def test_what_a_server_does_not_take_while_it_loads_is_asked_again_after_it():
    server, may_load = (
        FakeServer(BusyError("/generate", 503, "paused", 0.0), an_answer()),
        asyncio.Event(),
    )
    load = server.load_in_pause

    async def slowly(*arguments: object) -> float:
        await may_load.wait()
        return await load(*arguments)

    server.load_in_pause = slowly
    engine = engine_on(server, retry_timeout_s=0.1)
    update = WeightUpdate(policy_version=7, learner_id="h", manifest=(), endpoint=None, key=b"")  # type: ignore[arg-type]
    loading = asyncio.create_task(engine.load_weights(update))
    async with asyncio.timeout(120):
        while not engine._num_loads_begun:
            await asyncio.sleep(0)
        running = asyncio.create_task(engine.generate([5], ONE))
        await asyncio.sleep(0.2)
        assert len(server.asked) == 1
        may_load.set()
        await loading
        assert (await running).token_ids.tolist() == [3]
    await engine.close()


async def test_a_request_given_up_without_an_update_fails():
    engine = engine_on(FakeServer(aborted(3)))
    with pytest.raises(RolloutError, match="gave a request up without an update"):
        await engine.generate([5], ONE)
    await engine.close()


async def test_a_stopped_request_is_aborted_until_it_is_answered_with_what_was_sampled(monkeypatch):
    monkeypatch.setattr(requests, "_ABORT_EVERY_S", 0.001)
    at_abort: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    server, handle = FakeServer(at_abort), CompletionHandle()
    server.at_abort = at_abort
    engine = engine_on(server)
    two = SamplingParams(max_new_tokens=2)
    running = asyncio.create_task(engine.generate([5], two, handle))
    async with asyncio.timeout(120):
        while not server.asked:
            await asyncio.sleep(0)
        handle.stop.set()
        answer = await running
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([3, 4], FinishReason.DEADLINE)
    assert server.aborted == [server.asked[0].id] * 2, "it had ignored the first one"
    assert handle.num_tokens == -1, "the server reports none"
    await engine.close()


async def test_a_request_stopped_before_it_was_sent_is_not_sent():
    server, handle = FakeServer(), CompletionHandle()
    engine = engine_on(server)
    handle.stop.set()
    answer = await engine.generate([5], ONE, handle)
    assert (len(answer.token_ids), answer.finish_reason) == (0, FinishReason.DEADLINE)
    assert server.asked == []
    await engine.close()


async def test_a_server_that_stays_away_ends_every_request():
    server = FakeServer()
    engine = engine_on(server, retry_timeout_s=0.2)
    waiting = [asyncio.create_task(engine.generate([5], ONE)) for _ in range(3)]
    await asyncio.sleep(0)
    server.is_gone = True
    async with asyncio.timeout(120):
        for task in waiting:
            with pytest.raises(TransportError, match=r"is gone .*nobody there"):
                await task
    with pytest.raises(TransportError, match="is gone"):
        await engine.generate([5], ONE)
    await engine.close()


async def test_a_refused_request_is_the_only_one_to_fail():
    server = FakeServer(RolloutError("too long"), an_answer())
    engine = engine_on(server)
    with pytest.raises(RolloutError, match="too long"):
        await engine.generate([5], ONE)
    assert len((await engine.generate([5], ONE)).token_ids) == 1
    await engine.close()


async def test_a_server_that_fails_everything_is_asked_ever_more_slowly():
    failures = [RefusedError("/generate", 500, "no") for _ in range(4)]
    engine, times = engine_on(FakeServer(*failures, an_answer(), failures[0])), []
    for _ in failures:
        start = time.monotonic()
        with pytest.raises(RolloutError, match="/generate was answered with 500: no"):
            await engine.generate([5], ONE)
        times.append(time.monotonic() - start)
    assert times[3] > 0.35
    await engine.generate([5], ONE)
    assert engine._num_failed == 0
    await engine.close()


async def test_a_stopped_request_that_waits_for_a_slot_is_answered_at_once():
    engine = engine_on(FakeServer(), max_num_seqs=1)
    running = [asyncio.create_task(engine.generate([5], ONE)) for _ in range(2)]
    handle = CompletionHandle()
    waiting = asyncio.create_task(engine.generate([5], ONE, handle))
    async with asyncio.timeout(120):
        while engine.gauges()["num_waiting"] < 2:
            await asyncio.sleep(0)
    handle.stop.set()
    async with asyncio.timeout(120):
        answer = await waiting
    assert (len(answer.token_ids), answer.finish_reason) == (0, FinishReason.DEADLINE)
    assert not any(task.done() for task in running)
    await engine.close()
    await asyncio.gather(*running, return_exceptions=True)


async def test_with_an_old_cache_a_request_that_started_after_an_update_is_sent_again():
    late: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    of_seven = structs.replace(an_answer(-0.25), policy_versions=np.full(1, 7, np.int32))
    server = FakeServer(late, of_seven)
    engine = engine_on(server, keeps_old_kv=True)
    running = asyncio.create_task(engine.generate([5], ONE))
    async with asyncio.timeout(120):
        while not server.asked:
            await asyncio.sleep(0)
    update = WeightUpdate(policy_version=7, learner_id="h", manifest=(), endpoint=None, key=b"")  # type: ignore[arg-type]
    await engine.load_weights(update)
    late.set_result(structs.replace(of_seven, logprobs=np.full(1, -9.0, np.float32)))
    assert (await running).logprobs.tolist() == [-0.25]
    assert len({request.cache_salt for request in server.asked}) == 2
    await engine.close()


async def test_an_answer_from_before_the_learner_went_back_says_nothing_of_the_servers_version():
    """Else each request after it would be sampled twice."""
    late: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    of_seven, of_five = (
        structs.replace(an_answer(-0.25), policy_versions=np.full(1, version, np.int32))
        for version in (7, 5)
    )
    server = FakeServer(late, of_five)
    engine = engine_on(server, keeps_old_kv=True)
    running = None
    for version, learner_id in ((7, "before"), (5, "after")):
        update = WeightUpdate(
            policy_version=version,
            learner_id=learner_id,
            manifest=(),
            endpoint=None,
            key=b"",  # type: ignore[arg-type]
        )
        await engine.load_weights(update)
        running = running or asyncio.create_task(engine.generate([5], ONE))
        async with asyncio.timeout(120):
            while not server.asked:
                await asyncio.sleep(0)
    late.set_result(of_seven)
    async with asyncio.timeout(120):
        assert (await running).policy_versions.tolist() == [7]
        assert (await engine.generate([5], ONE)).policy_versions.tolist() == [5]
    assert len(server.asked) == 2
    await engine.close()


async def test_a_server_that_is_lost_within_an_update_is_named_with_what_to_do(monkeypatch):
    async def lost(*_: object) -> float:
        raise BrokenAnswerError("http://h:1/begin_weight_update: ReadError")

    server = FakeServer()
    monkeypatch.setattr(server, "load_in_pause", lost)
    engine = engine_on(server)
    update = WeightUpdate(policy_version=1, learner_id="l", manifest=(), endpoint=None, key=b"")  # type: ignore[arg-type]
    said = "Fake was lost in the middle of an update: http://h:1/begin.*ReadError; if .* again"
    with pytest.raises(TransportError, match=said):
        await engine.load_weights(update)
    await engine.close()


async def test_requests_beyond_twice_the_slots_wait_on_this_side():
    server = FakeServer()
    server.num_refusals = 1
    engine = engine_on(server, max_num_seqs=2)
    waiting = [asyncio.create_task(engine.generate([5], ONE)) for _ in range(7)]
    async with asyncio.timeout(120):
        while len(server.asked) < 4 or engine.gauges()["num_active"] != 1:
            await asyncio.sleep(0.001)
    assert engine.gauges()["num_waiting"] == 2 + 3
    waiting[0].cancel()
    async with asyncio.timeout(120):
        while len(server.asked) < 5:
            await asyncio.sleep(0.001)
    assert server.aborted == [server.asked[0].id]
    await engine.close()
    for task in waiting[1:]:
        with pytest.raises(RolloutError, match="closed"):
            await task


@pytest.mark.parametrize(
    ("is_own", "error", "message"),
    [
        (True, RolloutError, "did not give"),
        (False, TransportError, "started again, or serves somebody else"),
    ],
)
async def test_an_answer_of_other_weights_ends_the_engine_if_the_server_has_them(
    is_own, error, message
):
    server = FakeServer(ForeignWeightsError("which this generator did not give it"), an_answer())
    server.is_own = is_own
    engine = engine_on(server)
    with pytest.raises(error, match=message):
        await engine.generate([5], ONE)
    if is_own:
        assert len((await engine.generate([5], ONE)).token_ids) == 1
    else:
        with pytest.raises(TransportError, match=message):
            await engine.generate([5], ONE)
    await engine.close()


def test_weights_of_somebody_else_are_noticed():
    labels = Labels("me")
    spans = [VersionSpan("me/l/3", 0, 2), VersionSpan("me//4", 2, 3)]
    assert versions_of(spans, 3, labels).tolist() == [3, 3, 4]
    with pytest.raises(RolloutError, match="leaves out which weights"):
        versions_of(spans, 4, labels)
    for label in ("default", "other/l/3", "me/", "me/3", "me//", "3"):
        with pytest.raises(ForeignWeightsError, match="which this generator did not give it"):
            versions_of([VersionSpan(label, 0, 1)], 1, labels)
    assert Labels.new().label(1) != Labels.new().label(1)


def test_an_answer_whose_parts_do_not_fit_fails_alone():
    with pytest.raises(RolloutError, match="is inconsistent"):
        completion([3, 4], [-0.5], np.zeros(2, np.int32), "stop")


@pytest.mark.parametrize("reason", ["error", "tired", ""])
def test_an_answer_that_ended_for_no_known_reason_fails_alone(reason):
    with pytest.raises(RolloutError, match=f"for the reason '{reason}'"):
        completion([3], [-0.5], np.zeros(1, np.int32), reason)


def test_a_limit_on_repetition_truncates():
    answer = completion([3], [-0.5], np.zeros(1, np.int32), "repetition")
    assert answer.finish_reason.is_truncated


async def test_generators_that_start_together_probe_a_server_with_requests_of_their_own():
    """A server refuses a request whose id another one has that runs."""
    server = FakeServer(an_answer(-1e-7), an_answer(-1e-7))
    for _ in range(2):
        await probe(server.sample)
    assert len({request.id for request in server.asked}) == 2


async def test_the_probe_refuses_log_probabilities_before_truncation():
    with pytest.raises(ConfigError, match=r"was -0\.500 instead of 0"):
        await probe(FakeServer(an_answer()).sample)


def test_readings_sum_the_series_of_a_name():
    page = '# TYPE a gauge\na{x="1",mode="decode"} 2.0\na{x="2",mode="decode"} 3.5\n'
    page += 'a{mode="p"} 9\nab 7'
    names = {"n": ("a", 'mode="decode"'), "m": ("ab", ""), "none": ("c", "")}
    assert readings(page, names) == {"n": 5.5, "m": 7.0, "none": 0.0}


async def test_http_distinguishes_refusal_silence_and_loss(tmp_path):
    async def slow(_: object) -> tuple[int, object]:
        await asyncio.sleep(30)
        return 200, {}

    async def refusing(_: object) -> tuple[int, object]:
        return 503, {"error": {"message": "queue full", "code": 503}}

    async def wrong(_: object) -> tuple[int, object]:
        return 200, {"something": "else"}

    port = free_port()
    handlers = {"/slow": slow, "/refusing": refusing, "/wrong": wrong}
    server = await serve(handlers, "127.0.0.1", port)
    http = Http(f"http://127.0.0.1:{port}/", api_key="k")
    with pytest.raises(SlowAnswerError):
        await http.post("/slow", {}, dict, timeout_s=0.1)
    with pytest.raises(RefusedError, match="/refusing was answered with 503: queue full"):
        await http.send("/refusing", {})
    with pytest.raises(RefusedError, match="unexpected answer"):
        await http.post("/wrong", {}, list[int])
    await http.close()
    server.close()
    nobody = Http(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionLostError):
        await nobody.send("/slow", {})
    config = run_config(tmp_path, engine="vllm", vllm={"url": nobody.url})
    away = VllmServer(config, nobody.url, Labels.new())
    with pytest.raises(ConfigError, match=r"no inference server at http.* in 0.1 s"):
        await wait_until_up([away], 0.1)
    await away.close()
    await nobody.close()


async def test_a_server_that_wants_another_key_is_left_out_while_another_one_is_up(tmp_path):
    async def up(_: object) -> tuple[int, object]:
        return 200, {}

    async def locked(_: object) -> tuple[int, object]:
        return 403, {"error": {"message": "no", "code": 403}}

    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for answer in (locked, up):
            port = free_port()
            stack.callback((await serve({"/health": answer}, "127.0.0.1", port)).close)
            url = f"http://127.0.0.1:{port}"
            config = run_config(tmp_path, engine="vllm", vllm={"url": url})
            servers.append(VllmServer(config, url, Labels.new()))
            stack.push_async_callback(servers[-1].close)
        assert await wait_until_up(servers) == servers[1:]
        with pytest.raises(ConfigError, match=r"wants another key .*: .*403: no"):
            await wait_until_up(servers[:1], timeout_s=60)


@pytest.mark.parametrize(("kept_s", "expected"), [(3600.0, 1), (0.0, 3)])
async def test_an_idle_connection_is_left_before_its_server_closes_it(
    monkeypatch, kept_s: float, expected: int
):
    assert http_module.KEPT_S < 5, "as long as uvicorn keeps one"
    monkeypatch.setattr(http_module, "KEPT_S", kept_s)
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for _ in range(3):
        assert await http.get("/health", dict) == {}
    await http.close()
    server.close()
    assert num_connections == expected


@pytest.mark.parametrize(("end", "code"), [("exit 3", "3"), ("kill -ILL $$", "SIGILL")])
def test_a_server_process_that_ends_is_reported_with_its_last_log_line(tmp_path, end, code):
    process = ServerProcess(["sh", "-c", f"echo out of memory; {end}"], tmp_path / "logs" / "log")
    process._process.wait(120)
    with pytest.raises(TransportError, match=f"ended with {code}: out of memory"):
        process.require_alive()


OWNER = """
import pathlib, sys, time
from actors.engines.served.process import ServerProcess
script = "import os, subprocess, sys, time; print(os.getpid(), flush=True); " \\
    "subprocess.Popen(['sleep', '600']); time.sleep(600)"
ServerProcess([sys.executable, "-c", script], pathlib.Path(sys.argv[1]))
time.sleep(600)
"""


def test_a_server_process_ends_with_its_owner_however_that_ended(tmp_path: Path):
    log = tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log)])
    deadline = time.monotonic() + 120
    family: list[psutil.Process] = []
    while len(family) < 3 and time.monotonic() < deadline:
        family = psutil.Process(owner.pid).children(recursive=True)
        time.sleep(0.01)
    assert len(family) == 3, "the guard, the server and the server's own child"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive


@pytest.fixture
def bare_server() -> Iterator[str]:
    """The URL of a server that is healthy and knows nothing else, in a thread of its own."""
    loop, port = asyncio.new_event_loop(), free_port()

    async def healthy(_: object) -> tuple[int, object]:
        return 200, {}

    loop.run_until_complete(serve({"/health": healthy}, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_vllm_started_otherwise_is_refused_with_the_command_that_is_right(bare_server, tmp_path):
    make_model().save_pretrained(tmp_path)
    config = run_config(
        tmp_path, engine="vllm", vllm={"url": bare_server, "start_timeout_s": 120.0}
    )
    with pytest.raises(ConfigError) as refused:
        open_vllm(config)
    message = str(refused.value)
    assert "/init_weight_transfer_engine was answered with 404" in message
    assert f"VLLM_SERVER_DEV_MODE=1 vllm serve {tmp_path} --dtype float32" in message
    assert """--weight-transfer-config '{"backend": "streamrl"}'""" in message
