"""Whatever an inference server answers costs a request; the engine and its generator go on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from actors.engines import make_engine
from actors.engines.served.engine import ServedEngine
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import Completion, DropReason, SamplingParams
from tests.engines import make_model, run_config
from tests.standins import hostile_server as hostile
from tests.standins.hostile_server import HostileServer
from tests.unit.test_generator import Run

PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
FOUR = SamplingParams(max_new_tokens=4)
REQUEST_TIMEOUT_S, RETRY_TIMEOUT_S = 1.0, 0.5
SLOW = {"byte by byte", "headers byte by byte", "continues forever", "silence"}
SLOW |= {"silence after headers", "compressed bomb"}
# A hang is a hang; a machine that others use is slow.
DEADLINE_S = 120.0
MB = 2**20

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[HostileServer]:
    # Made once in a process, which takes as long as a request may.
    hostile.bomb()
    with hostile.hostile_server(request.param) as started:
        yield started


def config_for(
    server: HostileServer, model: Path, start_timeout_s: float = DEADLINE_S
) -> RunConfig:
    settings = {
        "url": server.url,
        "retry_timeout_s": RETRY_TIMEOUT_S,
        "start_timeout_s": start_timeout_s,
    }
    return run_config(
        model, engine=server.kind, max_num_seqs=4, max_model_len=64, **{server.kind: settings}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(server: HostileServer, model: Path) -> AsyncIterator[ServedEngine]:
    """One for all: it serves on, whatever it was answered before."""
    opened = make_engine(config_for(server, model), seed=0)
    assert isinstance(opened, ServedEngine)
    opened._server._request_timeout_s = DEADLINE_S
    yield opened
    await opened.close()


async def sample(engine: ServedEngine) -> Completion:
    async with asyncio.timeout(DEADLINE_S):
        return await engine.generate([5], FOUR)


async def assert_costs_a_request(engine: ServedEngine, server: HostileServer) -> str:
    """What the request failed with; the next one is answered."""
    num_bytes = server.num_bytes
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._server, "_request_timeout_s", REQUEST_TIMEOUT_S)
            with pytest.raises(RolloutError) as failed:
                await sample(engine)
        # What the kernel's buffers hold is beside the limit.
        assert server.num_bytes - num_bytes < 32 * MB
    finally:
        server.behave()
    assert (await sample(engine)).token_ids.tolist() == [3, 4]
    message = str(failed.value)
    assert f"{NAMES[server.kind]} at {server.url}" in message
    assert len(message) < 1000
    assert message.isprintable()
    return message


@pytest.mark.parametrize("name", [*hostile.WIRE, *hostile.STATUS, *hostile.TEXT])
async def test_a_bad_answer_costs_a_request(server, engine, name):
    behaviors = {**hostile.WIRE, **hostile.STATUS, **hostile.TEXT}
    server.misbehave(PATHS[server.kind], behaviors[name])
    message = await assert_costs_a_request(engine, server)
    assert PATHS[server.kind] in message or "the answer" in message


@pytest.mark.parametrize("name", hostile.REPLY)
async def test_a_reply_that_cannot_be_true_costs_a_request(server, engine, name):
    server.reply = hostile.REPLY[name]
    await assert_costs_a_request(engine, server)


@pytest.mark.parametrize("name", ["429", "503", "truncated", "garbage", "closed at once"])
async def test_what_passes_is_waited_for(server, engine, name, monkeypatch):
    # Half a second from the first failure to the third request is little on a busy machine.
    monkeypatch.setattr(engine, "_retry_timeout_s", DEADLINE_S)
    behaviors = {**hostile.WIRE, **hostile.STATUS}
    server.misbehave(PATHS[server.kind], behaviors[name], times=2)
    num_requests = server.num_requests
    assert (await sample(engine)).token_ids.tolist() == [3, 4]
    assert server.num_requests - num_requests == 3


async def test_a_broken_answer_is_asked_for_a_few_times_only(server, engine):
    num_requests = server.num_requests
    server.misbehave(PATHS[server.kind], hostile.WIRE["closed at once"])
    await assert_costs_a_request(engine, server)
    assert server.num_requests - num_requests <= 5


@pytest.mark.parametrize(
    "name", [*sorted(hostile.WIRE.keys() - SLOW), *hostile.STATUS, *hostile.TEXT]
)
async def test_gauges_that_cannot_be_read_cost_nothing(server, engine, name):
    server.misbehave("/metrics", {**hostile.WIRE, **hostile.STATUS, **hostile.TEXT}[name], times=1)
    async with asyncio.timeout(DEADLINE_S):
        while "/metrics" in server.behaviors:
            await asyncio.sleep(0.01)
    assert (await sample(engine)).token_ids.tolist() == [3, 4]
    server.behave()


@pytest.mark.parametrize("value", ["NaN", "inf", "-inf", "1e308", "-7", "9" * 400, "x", ""])
async def test_no_gauge_breaks_a_heartbeat(server, engine, value):
    series = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
    page = f"{series[server.kind]} {value}\n{series[server.kind]} {value}\n".encode()
    num_pages = server.num_pages
    server.misbehave("/metrics", hostile.text(page))
    async with asyncio.timeout(DEADLINE_S):
        while server.num_pages < num_pages + 2:
            await asyncio.sleep(0.01)
    assert 0 <= int(engine.gauges()["num_active"]) <= 2**53
    server.behave()


async def test_a_generator_goes_on_beside_a_server_that_misbehaves(server, engine, caplog):
    """The books count what failed, the log says why; the groups after it arrive."""
    run = Run()
    run.runner = replace(run.runner, engine=engine)
    await run.learner.attach(0, None)
    behaviors = {**hostile.WIRE, **hostile.STATUS, **hostile.TEXT}
    async with asyncio.timeout(2 * DEADLINE_S), run.generating():
        for name in ("500", "nested deeply and closed", "truncated"):
            server.misbehave(PATHS[server.kind], behaviors[name])
            failed = run.books.dropped.get(DropReason.FAILED, 0)
            while run.books.dropped.get(DropReason.FAILED, 0) <= failed:
                await asyncio.sleep(0.01)
        server.behave()
        while run.books.buffered < 4:
            await asyncio.sleep(0.01)
    assert run.books.balanced
    assert server.url in caplog.text
    assert f"{PATHS[server.kind]} was answered with 500: no" in caplog.text


# Paths of an engine's start; of those in READ the answer matters, too.
READ = {
    "vllm": ["/v1/models", "/get_world_size", "/weight_info", PATHS["vllm"]],
    "sglang": ["/v1/models", "/server_info", "/model_info", PATHS["sglang"]],
}
ACT = {
    "vllm": ["/health", "/init_weight_transfer_engine", "/pause", "/resume"],
    "sglang": ["/pause_generation", "/continue_generation", "/update_weight_version"],
}


def assert_no_start(model: Path, kind: str, path: str, name: str) -> None:
    """On a server of its own: an engine that starts takes the server from another."""
    with hostile.hostile_server(kind) as server:
        server.misbehave(path, {**hostile.STATUS, **hostile.TEXT}[name])
        with pytest.raises(ConfigError) as refused:
            make_engine(config_for(server, model, start_timeout_s=1.0), seed=0)
    assert server.url in str(refused.value)


@pytest.mark.parametrize("name", ["null", "a list", "nested deeply and closed"])
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_start_that_is_answered_with_nonsense_ends_with_a_sentence(
    model, kind, index, name
):
    assert_no_start(model, kind, READ[kind][index], name)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_start_that_is_refused_ends_with_a_sentence(model, kind, index):
    assert_no_start(model, kind, ACT[kind][index], "500")
