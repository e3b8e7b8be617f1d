"""Generators that share inference servers: whose a server is, who loads, who samples where."""

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

from actors.engines.served import engine as served, open as attaching, replicas
from actors.engines.served.engine import ServedEngine, standstill
from actors.engines.served.http import BusyError, ConnectionLostError, Http
from actors.engines.served.open import attach, labels_of_run, server_id
from actors.engines.served.replicas import Replica, ReplicatedEngine
from actors.engines.served.server import Labels
from actors.engines.weight_targets import weight_targets
from streamrl.config.generator import VllmSettings
from streamrl.errors import (
    ConfigError,
    RolloutError,
    TransportError,
    WeightTransferError,
)
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, HeldEndpoint, WeightUpdate
from streamrl.weights.protocol import NO_LEARNER
from streamrl.weights.receiver import Holding
from tests.engines import run_config
from tests.unit.test_served_engine import ONE, FakeServer, aborted, an_answer, engine_on
from tests.waiting import until as waiting_until

RUN, OTHER = Labels.of_run("this"), Labels.of_run("other")
DEADLINE_S = 120.0

until = partial(waiting_until, deadline_s=DEADLINE_S, every_s=0.005)


def update(version: int, endpoint: object = None, learner: str = "l") -> WeightUpdate:
    return WeightUpdate(
        policy_version=version,
        learner_id=learner,
        manifest=(),
        endpoint=endpoint,  # type: ignore[arg-type]
        key=b"",
    )


def of(version: int) -> Completion:
    return structs.replace(an_answer(), policy_versions=np.full(1, version, np.int32))


def shared(*answers: object) -> FakeServer:
    server = FakeServer(*answers)  # type: ignore[arg-type]
    server.labels = RUN
    server.held = RUN.taken
    return server


async def test_an_engine_takes_over_the_version_that_another_generator_has_loaded():
    server = shared(of(3))
    engine = engine_on(server)
    with pytest.raises(WeightTransferError, match="not version 3"):
        await engine.load_weights(update(3, HeldEndpoint()))
    server.held = RUN.label(3, "another")
    with pytest.raises(WeightTransferError, match="not version 3"):
        await engine.load_weights(update(3, HeldEndpoint()))
    server.held = RUN.label(3, "l")
    await engine.load_weights(update(3, HeldEndpoint()))
    assert (engine.policy_version, server.loaded) == (3, [])
    assert (await engine.generate([5], ONE)).policy_versions.tolist() == [3]
    await engine.close()


async def test_a_version_of_a_killed_owner_is_loaded_again():
    """Its server may still be paused."""
    server = shared()
    server.held = RUN.label(3, "l")
    engine = engine_on(server)
    await engine.load_weights(update(3))
    assert (engine.policy_version, server.loaded) == (3, [3])
    await engine.close()


async def test_a_version_that_the_server_has_before_the_learner_says_so_is_recorded():
    server = shared(of(1), of(2))
    engine = engine_on(server)
    server.held = RUN.label(1, "l")
    assert (await engine.generate([5], ONE)).policy_versions.tolist() == [1]
    assert engine.policy_version == 0, "it leases by what the learner has said"
    with pytest.raises(RolloutError, match="names version 2, and 1 is the newest"):
        await engine.generate([5], ONE)
    await engine.close()


async def test_prefixes_of_the_version_before_are_not_used_after_anothers_update():
    server = shared(of(1), structs.replace(of(1), logprobs=np.full(1, -0.25, np.float32)))
    server.held = RUN.label(1, "l")
    engine = engine_on(server, keeps_old_kv=True)
    assert (await engine.generate([5], ONE)).logprobs.tolist() == [-0.25]
    assert len({request.cache_salt for request in server.asked}) == 2
    await engine.close()


async def test_a_request_that_anothers_update_has_ended_begins_anew():
    engine = engine_on(shared(aborted(3), an_answer()))
    assert (await engine.generate([5], ONE)).token_ids.tolist() == [3]
    await engine.close()


async def test_a_shared_server_that_somebody_else_takes_ends_the_generator():
    server = shared()
    engine = engine_on(server)
    waiting = asyncio.create_task(engine.generate([5], ONE))
    server.held = OTHER.taken
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransportError, match="serves somebody else"):
            await waiting
    await engine.close()


async def test_a_process_that_stood_still_in_a_load_changes_nothing_more(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.ahead_s, ahead_s=0.0)
    monkeypatch.setattr(served, "time", clock)
    async with standstill(longest_s=5) as require_none:
        require_none()
        clock.ahead_s = 6.0
        await asyncio.sleep(0.3)
        with pytest.raises(TransportError, match=r"stood still for (\d+) s") as caught:
            require_none()
        (stood_s,) = re.findall(r"for (\d+) s", str(caught.value))
        assert 6 <= int(stood_s) < 6 + DEADLINE_S


class FakeStart:
    """A server whose label is looked at by `num_users` others, once in each window."""

    http = Http("http://127.0.0.1:1")

    def __init__(self, label: str, labels: Labels, num_users: int = 0) -> None:
        self.now = label
        self.labels = labels
        self.num_users = num_users
        self.seen = 0
        self.calls: list[str] = []

    async def require_settings(self) -> None: ...

    async def label(self) -> str:
        return self.now

    async def take(self) -> None:
        self.calls.append("take")
        self.now = self.labels.taken

    async def restore(self) -> None:
        self.calls.append("restore")
        self.now = self.labels.label(0)

    async def sample(self, request: object) -> Completion:
        assert self.labels.version(self.now) == 0
        self.calls.append("sample")
        return an_answer(0.0)

    async def num_looks(self) -> float:
        self.seen += self.num_users
        return self.seen


async def attached(server: FakeStart, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(attaching, "_WINDOW_S", 0.0)
    config = run_config(Path("nowhere"), engine="vllm", vllm={"url": "http://a:1"})
    await attach(config, server)  # type: ignore[arg-type]
    return server.calls


@pytest.mark.parametrize(
    ("label", "labels", "calls"),
    [
        (RUN.label(7, "l"), RUN, []),
        (RUN.taken, RUN, []),
        ("default", RUN, ["take", "sample"]),
        (OTHER.label(7, "l"), RUN, ["take", "sample"]),
        (OTHER.label(7, "l"), Labels("alone"), ["restore", "sample"]),
        ("alone/l/3", Labels("another"), ["restore", "sample"]),
    ],
)
async def test_a_server_is_taken_unless_it_is_this_runs(label, labels, calls, monkeypatch):
    assert await attached(FakeStart(label, labels), monkeypatch) == calls


@pytest.mark.parametrize("labels", [RUN, Labels("alone")])
async def test_a_server_that_another_run_uses_is_refused(labels, monkeypatch):
    server = FakeStart(OTHER.label(7, "l"), labels, num_users=1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 is in use by generators"):
        await attached(server, monkeypatch)
    assert server.calls == []


async def test_who_looks_may_be_a_generator_of_this_run_that_took_the_server_meanwhile(monkeypatch):
    class TakenMeanwhile(FakeStart):
        async def num_looks(self) -> float:
            self.now = RUN.taken
            return await super().num_looks()

    server = TakenMeanwhile(OTHER.label(7, "l"), RUN, num_users=1)
    assert await attached(server, monkeypatch) == []


def test_two_runs_have_different_labels_and_the_generators_of_one_the_same(tmp_path):
    def owner(**sections: dict[str, object]) -> str:
        config = run_config(tmp_path, engine="vllm", vllm={"url": "http://a:1", **sections})
        return labels_of_run(config).owner

    assert owner() == owner(retry_timeout_s=3)
    assert owner() != owner(pause_mode="abort")
    assert server_id("http://127.0.0.1:80/") == server_id("http://localhost:80")
    assert server_id("http://127.0.0.1:80") != server_id("http://127.0.0.1:81")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (["http://a:1", "http://b:1", "http://a:1/"], "http://a:1 stands there twice"),
        ([], "empty list"),
        (["http://a:1", "b:1"], "was 'b:1'; it must be http://host:port"),
        ("http://a:1,http://b:1", "it must be http://host:port, or a list of such"),
    ],
)
def test_a_bad_list_of_servers_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        VllmSettings(url=url)


class Fleet:
    """Servers that tests end and start again, and the engine on them."""

    def __init__(self, count: int, retry_timeout_s: float = 5.0) -> None:
        self.servers = [shared() for _ in range(count)]
        self.refusals: dict[int, Exception] = {}
        self.num_refused = 0
        self.engine = ReplicatedEngine(
            [Replica(f"http://127.0.0.1:{i}", self._opener(i)) for i in range(count)],
            retry_timeout_s=retry_timeout_s,
        )

    def _opener(self, i: int) -> Callable:
        async def open_engine() -> ServedEngine:
            if self.servers[i].is_gone:
                self.num_refused += 1
                raise self.refusals.get(i, TransportError("nobody there"))
            return engine_on(self.servers[i], retry_timeout_s=0.05)

        return open_engine

    async def load(self, version: int, *indices: int, learner: str = "l") -> None:
        for i in indices:
            await until(lambda i=i: self.engine.replicas[i].is_up)
            await self.engine.replicas[i].load_weights(update(version, learner=learner))
            self.servers[i].held = RUN.label(version, learner)

    def generate(self, handle: CompletionHandle | None = None) -> "asyncio.Task[Completion]":
        return asyncio.create_task(self.engine.generate([5], ONE, handle))

    def asked(self) -> list[int]:
        return [len(server.asked) for server in self.servers]


async def test_servers_with_weights_of_two_learners_are_of_neither():
    """Their versions may have the same number; one that has failed to load counts for nothing."""
    fleet = Fleet(2)
    assert fleet.engine.learner_id == ""
    await fleet.load(12, 0, 1, learner="old")
    assert fleet.engine.learner_id == "old"
    await fleet.load(12, 0, learner="new")
    assert (fleet.engine.policy_version, fleet.engine.learner_id) == (12, NO_LEARNER)
    await fleet.load(12, 1, learner="new")
    assert fleet.engine.learner_id == "new"
    await fleet.engine.close()
    assert fleet.engine.learner_id == "new"


async def test_requests_go_to_the_least_loaded_server_and_the_turns_of_an_episode_to_one():
    fleet = Fleet(3)
    await fleet.load(1, 0, 1, 2)
    tasks = []
    for _ in range(6):
        tasks.append(fleet.generate())
        await until(lambda: sum(fleet.asked()) == len(tasks))
    assert fleet.asked() == [2, 2, 2]
    stop = asyncio.Event()
    for turn in range(3):
        tasks.append(fleet.generate(CompletionHandle(stop)))
        await until(lambda: sum(fleet.asked()) == len(tasks))
        assert sorted(fleet.asked()) == [2, 2, 3 + turn]
    await fleet.engine.close()
    for task in tasks:
        with pytest.raises(RolloutError, match="closed"):
            await task


async def test_a_server_without_the_newest_weights_gets_no_request():
    fleet = Fleet(2)
    waiting = fleet.generate()
    await until(lambda: all(replica.is_up for replica in fleet.engine.replicas))
    assert fleet.asked() == [0, 0], "neither has weights"
    assert [replica.holding() for replica in fleet.engine.replicas] == [Holding.LOST] * 2
    await fleet.load(1, 1)
    await until(lambda: fleet.asked() == [0, 1])
    assert (fleet.engine.policy_version, fleet.engine.has_weights) == (1, True)
    await fleet.load(1, 0)
    await fleet.load(2, 0)
    assert fleet.engine.policy_version == 1, "the oldest of both"
    await fleet.engine.close()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_an_engine_that_has_failed_gets_no_request_before_it_is_closed():
    """Which would fail at once, again and again."""
    fleet = Fleet(1)
    await fleet.load(1, 0)
    (replica,) = fleet.engine.replicas
    replica.ready.fail(TransportError("gone"))
    assert (replica.is_up, replica.ready) == (True, None)
    await fleet.engine.close()


@pytest.mark.parametrize(
    "refusal",
    [BusyError("/v1/models", 503, "not yet", 0.0), OSError("Name or service not known")],
    ids=["busy", "no name"],
)
async def test_a_server_that_cannot_be_used_yet_is_asked_again(monkeypatch, refusal):
    monkeypatch.setattr(replicas, "_REOPEN_S", 0.01)
    fleet = Fleet(2)
    fleet.servers[1].is_gone = True
    fleet.refusals[1] = refusal
    await fleet.load(1, 0)
    back = fleet.engine.replicas[1]
    await until(lambda: fleet.num_refused > 1)
    assert not back.is_up
    fleet.servers[1] = shared()
    await until(lambda: back.is_up)
    await fleet.engine.close()


async def test_requests_of_a_dead_server_are_sampled_again_and_it_returns_with_new_weights():
    fleet = Fleet(2)
    await fleet.load(1, 0, 1)
    tasks = [fleet.generate() for _ in range(4)]
    await until(lambda: fleet.asked() == [2, 2])
    fleet.servers[1]._answers = []
    fleet.servers[1].is_gone = True
    await until(lambda: fleet.asked()[0] == 4)
    assert fleet.engine.gauges()["num_resampled"] == 2
    dead = fleet.engine.replicas[1]
    assert dead.holding() is Holding.GONE
    with pytest.raises(WeightTransferError, match="is gone"):
        await dead.load_weights(update(2))

    fleet.servers[1] = shared(of(2))
    await until(lambda: dead.is_up)
    tasks.append(fleet.generate())
    await until(lambda: fleet.asked() == [5, 0])
    assert dead.holding() is Holding.LOST, "the next Hello asks for the newest version"
    await fleet.load(2, 1)
    assert dead.holding() is Holding.KEPT
    assert (await fleet.generate()).policy_versions.tolist() == [2]
    await fleet.engine.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_load_that_fails_in_its_pause_costs_the_server_and_not_the_engine():
    fleet = Fleet(2)
    await fleet.load(1, 0, 1)

    async def broken(*_: object) -> float:
        raise ConnectionLostError("reset")

    fleet.servers[0].load_in_pause = broken  # type: ignore[method-assign]
    with pytest.raises(WeightTransferError, match="reset"):
        await fleet.engine.replicas[0].load_weights(update(2))
    await until(lambda: fleet.engine.replicas[0].holding() is not Holding.KEPT)
    fleet.servers[1]._answers = [of(1)]
    assert (await fleet.generate()).policy_versions.tolist() == [1]
    await fleet.engine.close()


async def test_a_load_ends_when_its_server_is_gone():
    fleet = Fleet(2)
    await fleet.load(1, 0, 1)
    replica, is_asked = fleet.engine.replicas[0], asyncio.Event()

    async def endless(_: object) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    fleet.servers[0].receive = endless  # type: ignore[method-assign]
    loading = asyncio.create_task(replica.load_weights(update(2)))
    await is_asked.wait()
    fleet.servers[0].is_gone = True
    assert replica._engine is not None
    replica._engine.fail(TransportError("reset by peer"))
    with pytest.raises(WeightTransferError, match="in the load: reset by peer"):
        await asyncio.wait_for(loading, DEADLINE_S)
    assert replica.holding() is not Holding.KEPT
    await fleet.engine.close()


async def test_a_load_that_the_end_of_the_generator_cancels_is_cancelled():
    fleet = Fleet(1)
    await fleet.load(1, 0)
    (server,), (replica,) = fleet.servers, fleet.engine.replicas
    arriving = asyncio.get_running_loop().create_future()

    async def receive(_: object) -> None:
        await arriving

    async def close() -> None:
        arriving.cancel()

    server.receive, server.close = receive, close  # type: ignore[method-assign]
    loading = asyncio.create_task(replica.load_weights(update(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await fleet.engine.close()
    with pytest.raises(asyncio.CancelledError):
        await loading


async def test_without_any_server_the_engine_fails():
    fleet = Fleet(2, retry_timeout_s=0.2)
    for server in fleet.servers:
        server.is_gone = True
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransportError, match="all 2 inference servers are gone"):
            await fleet.engine.generate([5], ONE)
    await fleet.engine.close()


async def test_each_server_is_a_receiver_of_its_own(tmp_path):
    urls = ["http://127.0.0.1:0", "http://127.0.0.1:1"]
    config = run_config(tmp_path, engine="vllm", vllm={"url": urls})
    fleet = Fleet(2)
    targets = weight_targets(fleet.engine, config.generator)
    assert [target.server for target in targets] == [server_id(url) for url in urls]
    assert len({target.name for target in targets}) == 2
    one = weight_targets(engine_on(shared()), config.generator)
    assert [(target.name, target.server) for target in one] == [("", server_id(urls[0]))]
    await fleet.engine.close()
