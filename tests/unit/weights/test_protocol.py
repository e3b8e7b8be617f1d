"""Receivers come to the newest version by every route. Real sockets and gloo groups.

The receivers here are in the test's process; `tests/system` has them in processes of their own.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from streamrl import wire
from streamrl.types import BroadcastEndpoint, FilesEndpoint, SharedEndpoint
from streamrl.weights import receiver as receiving
from streamrl.weights.locality import locality_of
from streamrl.weights.membership import Membership, Peer
from streamrl.weights.protocol import (
    UNKNOWN_LOCALITY,
    Announce,
    FromReceiver,
    FromSender,
    Hello,
    Loaded,
    Ready,
    Transfer,
)
from tests.ports import free_port
from tests.unit.weights.update_run import SHAPES, Generator, Run, run
from tests.waiting import until


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"backend": "gloo"}, BroadcastEndpoint),
        ({"backend": "gloo", "verify": True}, BroadcastEndpoint),
        ({"backend": "gloo", "delta": True}, BroadcastEndpoint),
        ({}, SharedEndpoint),
        ({"backend": "shared", "verify": True}, SharedEndpoint),
        ({"transport": "files"}, FilesEndpoint),
        ({"transport": "files", "delta": True}, FilesEndpoint),
    ],
    ids=[
        *("broadcast", "broadcast verify", "broadcast delta"),
        *("shared", "shared verify", "files", "files delta"),
    ],
)
async def test_every_receiver_gets_every_value_of_the_newest_version(tmp_path, settings, kind):
    async with run(tmp_path, **settings) as started:
        generators = [started.join(name, locality_of("cpu"))[0] for name in "ab"]
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, version / 2)
            await until(lambda v=version: all(g.policy_version == v for g in generators))
            assert all(g.has(version / 2) for g in generators)
        assert {type(update.endpoint) for g in generators for update in g.updates} == {kind}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"backend": "gloo"}, [Announce, Ready, Transfer, Loaded]),
        ({"backend": "shared"}, [Transfer, Loaded]),
        ({"transport": "files"}, [Transfer, Loaded]),
    ],
    ids=["broadcast", "shared", "files"],
)
async def test_only_a_broadcast_is_announced(tmp_path, monkeypatch, settings, expected):
    messages: list[type] = []
    encode = wire.encode

    def recorded(message: object) -> bytes:
        is_of_the_protocol = isinstance(message, FromReceiver | FromSender)
        if is_of_the_protocol and not isinstance(message, Hello):
            messages.append(type(message))
        return encode(message)

    monkeypatch.setattr(wire, "encode", recorded)
    async with run(tmp_path, **settings) as started:
        started.join("a", locality_of("cpu"))
        started.publish(1, 1.0)
        await until(lambda: "receive_s" in started.sender.gauges())
        assert messages == expected
        assert (started.sender.gauges()["ready_wait_s"] > 0) == (Announce in expected)


async def test_each_process_is_sent_the_manifest_once(tmp_path, monkeypatch):
    sent: list[int] = []
    encode = wire.encode

    def recorded(message: object) -> bytes:
        if isinstance(message, Transfer):
            sent.append(len(message.update.manifest))
        return encode(message)

    monkeypatch.setattr(wire, "encode", recorded)
    async with run(tmp_path, backend="shared") as started:
        generator, task = started.join("a", locality_of("cpu"))
        started.publish(1, 1.0)
        await until(lambda: any(p.hello.manifest for p in started.sender._membership.alive()))
        started.publish(2, 2.0)
        await until(lambda: generator.has(2.0))
        assert sent == [len(SHAPES), 0]
        task.cancel()
        await until(lambda: started.sender.gauges()["num_receivers"] == 0)
        successor, _ = started.join("a", locality_of("cpu"))
        await until(lambda: successor.has(2.0))
        assert sent == [len(SHAPES), 0, len(SHAPES)]


async def test_version_0_is_the_model_folders_and_is_not_sent(tmp_path):
    async with run(tmp_path) as started:
        started.publish(0, 0.0)
        generator, _ = started.join("a")
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        started.publish(1, 1.0)
        await until(lambda: generator.policy_version == 1)
        assert [update.policy_version for update in generator.updates] == [1]


async def test_a_receiver_that_has_the_version_makes_nobody_look_at_all_of_them(
    tmp_path, monkeypatch
):
    outdated, looks = Membership.outdated, []

    def counted(self: Membership, version: int) -> list[Peer]:
        looks.append(version)
        return outdated(self, version)

    monkeypatch.setattr(Membership, "outdated", counted)
    async with run(tmp_path) as started:
        generator, _ = started.join("a")
        started.publish(1, 1.0)
        await until(lambda: generator.policy_version == 1)
        await until(lambda: "receive_s" in started.sender.gauges())
        await asyncio.sleep(0.1)
        before = len(looks)
        has = Hello("b", "session", 1, generator.updates[0].learner_id)
        for _ in range(100):
            started.sender._on_hello(has)
            await asyncio.sleep(0)
        assert len(looks) - before < 5
        started.sender._on_hello(replace(has, policy_version=0))
        await until(lambda: len(looks) > before)


@pytest.mark.parametrize(
    ("catch_up", "kind"), [("files", FilesEndpoint), ("broadcast", BroadcastEndpoint)]
)
async def test_a_late_joiner_catches_up_the_way_it_is_configured(tmp_path, catch_up, kind):
    async with run(tmp_path, catch_up=catch_up) as started:
        first, _ = started.join("first")
        started.publish(1, 1.0)
        await until(lambda: first.policy_version == 1)
        late, _ = started.join("late")
        await until(lambda: late.policy_version == 1)
        assert late.has(1.0)
        assert isinstance(late.updates[0].endpoint, kind)
        started.publish(2, 2.0)
        await until(lambda: first.has(2.0) and late.has(2.0))


async def test_a_receiver_that_was_there_before_its_learner_is_heard_at_once(monkeypatch):
    monkeypatch.setattr(receiving, "HELLO_S", 600.0)
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as learner:
        waiting = asyncio.create_task(Generator(address, "a").receiver.run())
        for _ in range(10):
            await asyncio.sleep(0)
        learner.bind(address)
        async with asyncio.timeout(120):
            *_, frame = await learner.recv_multipart()
        message: FromReceiver = wire.decode(frame, FromReceiver)
        assert isinstance(message, Hello)
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_the_group_is_kept_while_members_stay_and_formed_anew_when_they_change(tmp_path):
    async with run(tmp_path) as started:
        first, _ = started.join("first")
        second, second_task = started.join("second")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, 1.0)
            await until(lambda v=version: first.policy_version == second.policy_version == v)
        second_task.cancel()
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        started.publish(3, 3.0)
        await until(lambda: first.has(3.0))
        names = [update.endpoint.group for update in first.updates]
        assert names[0] == names[1] != names[2]


async def test_who_can_share_memory_does_and_the_others_share_a_broadcast(tmp_path):
    async with run(tmp_path) as started:
        near, _ = started.join("near", locality_of("cpu"))
        far = [started.join(name)[0] for name in ("far", "farther")]
        everybody = [near, *far]
        await until(lambda: started.sender.gauges()["num_receivers"] == 3)
        for version in (1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: all(g.has(float(v)) for g in everybody))
        assert {type(update.endpoint) for update in near.updates} == {SharedEndpoint}
        assert [update.endpoint.world_size for update in far[0].updates] == [3, 3]


async def test_who_cannot_share_after_all_gets_a_broadcast_at_once(tmp_path):
    async with run(tmp_path, catch_up="broadcast") as started:
        good, _ = started.join("good", locality_of("cpu"))
        bad, _ = started.join("bad", locality_of("cpu"))
        bad.fails_to_share = True
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: good.has(float(v)) and bad.has(float(v)))
        assert bad.num_begun == 3, "it is not tried again"
        assert {type(update.endpoint) for update in bad.updates} == {BroadcastEndpoint}
        assert {type(update.endpoint) for update in good.updates} == {SharedEndpoint}


async def test_shared_by_name_refuses_who_cannot_and_serves_the_others(tmp_path, caplog):
    async with run(tmp_path, backend="shared", catch_up="broadcast") as started:
        good, _ = started.join("good", locality_of("cpu"))
        bad, _ = started.join("bad")
        bad.fails_to_share = True
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: good.has(float(v)))
        await until(lambda: started.sender.gauges()["num_failed_loads"] >= 2)
        assert (bad.policy_version, bad.updates) == (0, [])
        assert "bad did not load version 2: told not to share" in caplog.text


def is_free(address: str) -> bool:
    """Whether nobody listens there; zmq lets go of an address a moment after a socket's end."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


async def starting_again(
    tmp_path: Path, tasks: asyncio.TaskGroup, address: str, settings: dict[str, object]
) -> Run:
    """At an address that a sender of this process had: ZeroMQ frees it from a thread of its own."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(zmq.ZMQError):
                return Run(tmp_path, tasks, address=address, **settings)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("locality", "settings"),
    [
        (UNKNOWN_LOCALITY, {}),
        (UNKNOWN_LOCALITY, {"backend": "gloo", "delta": True}),
        (locality_of("cpu"), {}),
    ],
    ids=["broadcast", "broadcast delta", "shared"],
)
async def test_generators_follow_a_learner_that_starts_again(tmp_path, locality, settings):
    """The same version number of another learner is that of other weights, and no base."""
    async with run(tmp_path, **settings) as started:
        generator, _ = started.join("a", locality)
        for version in (0, 1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: not v or generator.has(float(v)))
        sender_task = started.running[0]
        sender_task.cancel()
        await asyncio.wait([sender_task])
        started.sender.close()
        await until(lambda: is_free(started.sender.address))
        async with asyncio.TaskGroup() as tasks:
            again = await starting_again(tmp_path, tasks, started.sender.address, settings)
            for version in (1, 2):
                again.publish(version, 5.0 + version)
                await until(lambda v=version: generator.has(5.0 + v))
            assert again.sender.gauges()["num_failed_loads"] == 0
            again.running[0].cancel()
            await asyncio.wait(again.running)
            again.sender.close()
