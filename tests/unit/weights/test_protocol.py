"""Receivers come to the newest version, whatever happens on the way. Real sockets and gloo groups.

The receivers here live in the test's process; `tests/system` has them in processes of their own.
"""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import (
    BroadcastEndpoint,
    FilesEndpoint,
    LoadReport,
    Locality,
    SharedEndpoint,
    WeightUpdate,
)
from streamrl.weights import membership
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.locality import locality_of
from streamrl.weights.protocol import UNKNOWN_LOCALITY
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender import WeightSender
from streamrl.weights.transports.files import FileSender
from streamrl.weights.transports.receive import TransferReceiver

SHAPES = {"embed": (50, 8), "head": (8, 50), "norm": (8,)}


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_free(address: str) -> bool:
    """Whether nobody listens there; zmq lets go of an address a moment after a socket's end."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


class Generator:
    """A receiver that keeps what it loads."""

    def __init__(self, address: str, name: str, locality: Locality = UNKNOWN_LOCALITY) -> None:
        self.policy_version = 0
        self.updates: list[WeightUpdate] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = self.fails_to_share = False
        self.open = asyncio.Event()
        self.open.set()
        self.num_begun = 0
        self._transfer = TransferReceiver()
        self.receiver = WeightReceiver(
            address, name, f"session of {name}", self.load, locality=locality
        )

    async def load(self, update: WeightUpdate) -> LoadReport:
        self.num_begun += 1
        await self.open.wait()
        if self.fails:
            raise WeightTransferError("told to fail")
        if self.fails_to_share and isinstance(update.endpoint, SharedEndpoint):
            raise WeightTransferError("told not to share")
        received = await asyncio.to_thread(
            lambda: {name: tensor.clone() for name, tensor in self._transfer.tensors(update)}
        )
        self.weights = received
        self.policy_version = update.policy_version
        self.updates.append(update)
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    def has(self, value: float) -> bool:
        return self.weights.keys() == SHAPES.keys() and all(
            torch.equal(tensor, torch.full_like(tensor, value)) for tensor in self.weights.values()
        )


class Run:
    """A sender and its receivers, as tasks."""

    def __init__(self, tmp_path: Path, tasks: asyncio.TaskGroup, **settings: object) -> None:
        chosen = {"address": "tcp://127.0.0.1:*", "bucket_bytes": 600, "deadline_s": 4, **settings}
        layout = Layout(manifest_of(parameters(0.0)), int(str(chosen["bucket_bytes"])))
        self._tasks = tasks
        self.sender = WeightSender(
            WeightSettings.model_validate(chosen), layout, torch.device("cpu"), tmp_path
        )
        self.running = [tasks.create_task(self.sender.run())]

    def join(
        self, name: str, locality: Locality = UNKNOWN_LOCALITY
    ) -> tuple[Generator, "asyncio.Task[None]"]:
        generator = Generator(self.sender.address, name, locality)
        task = self._tasks.create_task(generator.receiver.run())
        self.running.append(task)
        return generator, task

    def publish(self, version: int, value: float) -> None:
        self.sender.snapshot(parameters(value), version)
        self.sender.publish()


async def starting_again(tmp_path: Path, tasks: asyncio.TaskGroup, address: str) -> Run:
    """At an address that a sender of this process had: ZeroMQ frees it from a thread of its own."""
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(zmq.ZMQError):
                return Run(tmp_path, tasks, address=address)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run(tmp_path: Path, **settings: object) -> AsyncIterator[Run]:
    async with asyncio.TaskGroup() as tasks:
        started = Run(tmp_path, tasks, **settings)
        yield started
        for task in started.running:
            task.cancel()
        await asyncio.wait(started.running)
        started.sender.close()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"backend": "gloo"}, BroadcastEndpoint),
        ({"backend": "gloo", "verify": True}, BroadcastEndpoint),
        ({}, SharedEndpoint),
        ({"backend": "shared", "verify": True}, SharedEndpoint),
        ({"transport": "files"}, FilesEndpoint),
        ({"transport": "files", "delta": True}, FilesEndpoint),
    ],
    ids=["broadcast", "broadcast verify", "shared", "shared verify", "files", "delta"],
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


async def test_version_0_is_the_model_folders_and_is_not_sent(tmp_path):
    async with run(tmp_path) as started:
        started.publish(0, 0.0)
        generator, _ = started.join("a")
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        started.publish(1, 1.0)
        await until(lambda: generator.policy_version == 1)
        assert [update.policy_version for update in generator.updates] == [1]


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


async def test_a_receiver_that_fails_does_not_keep_the_others_and_gets_the_next_chance(tmp_path):
    async with run(tmp_path, deadline_s=2) as started:
        good, _ = started.join("good")
        bad, _ = started.join("bad")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        bad.fails = True
        started.publish(1, 1.0)
        await until(lambda: good.has(1.0))
        assert bad.policy_version == 0
        bad.fails = False
        await until(lambda: bad.has(1.0))


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


async def test_a_receiver_that_stopped_answering_is_left_out_within_the_deadline(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "ALIVE_S", 1000.0)
    async with run(tmp_path, deadline_s=2) as started:
        good, _ = started.join("good")
        silent, task = started.join("silent")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        silent.receiver._send = lambda _: asyncio.sleep(0)  # no Ready, no Goodbye
        started.publish(1, 1.0)
        await until(lambda: good.has(1.0), deadline_s=4.0)
        assert started.sender.gauges()["num_receivers"] == 1
        task.cancel()


async def test_who_is_slow_to_read_a_file_holds_up_nobody_and_may_be_replaced(tmp_path):
    async with run(tmp_path, transport="files", deadline_s=1000) as started:
        good, _ = started.join("good")
        slow, task = started.join("slow")
        slow.open.clear()
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: good.has(float(v)))
        assert (slow.num_begun, slow.policy_version) == (1, 0), "it is asked one thing at a time"
        slow.open.set()
        await until(lambda: slow.has(2.0))
        slow.open.clear()
        started.publish(3, 3.0)
        await until(lambda: slow.num_begun == 3)
        task.cancel()
        again, _ = started.join("slow")
        await until(lambda: again.has(3.0))


async def test_who_comes_a_round_later_gets_the_same_difference(tmp_path):
    async with run(tmp_path, transport="files", delta=True) as started:
        quick, _ = started.join("quick")
        late, _ = started.join("late")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        started.publish(1, 1.0)
        await until(lambda: quick.has(1.0) and late.has(1.0))
        late.open.clear()
        for version in (2, 3):
            started.publish(version, float(version))
            await until(lambda v=version: quick.has(float(v)))
        late.open.set()
        await until(lambda: late.has(3.0))
        paths = [[update.endpoint.path for update in g.updates] for g in (quick, late)]
        assert paths[0] == paths[1]
        assert [path.endswith(".delta.safetensors") for path in paths[0]] == [False, True, True]


async def test_a_file_system_that_is_full_or_stands_still_is_named_and_waited_for(
    tmp_path, monkeypatch, caplog
):
    async with run(tmp_path, transport="files", deadline_s=0.2) as started:
        write, may_write = FileSender.write, threading.Event()
        failures = iter([OSError(errno.ENOSPC, "No space left on device")])

        def write_late(*arguments: Any) -> dict[str, FilesEndpoint]:
            for failure in failures:
                raise failure
            may_write.wait()
            return write(*arguments)

        monkeypatch.setattr(FileSender, "write", write_late)
        generator, _ = started.join("a")
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        started.publish(1, 1.0)
        await until(lambda: "cannot be written: [Errno 28] No space left" in caplog.text)
        await until(lambda: "its file is not written after" in caplog.text)
        may_write.set()
        await until(lambda: generator.has(1.0))


@pytest.mark.parametrize(
    "locality", [UNKNOWN_LOCALITY, locality_of("cpu")], ids=["broadcast", "shared"]
)
async def test_generators_follow_a_learner_that_starts_again(tmp_path, locality):
    """The same version number of another learner stands for other weights."""
    async with run(tmp_path) as started:
        generator, _ = started.join("a", locality)
        started.publish(1, 1.0)
        await until(lambda: generator.has(1.0))
        sender_task = started.running[0]
        sender_task.cancel()
        await asyncio.wait([sender_task])
        started.sender.close()
        await until(lambda: is_free(started.sender.address))
        async with asyncio.TaskGroup() as tasks:
            again = await starting_again(tmp_path, tasks, started.sender.address)
            again.publish(1, 5.0)
            await until(lambda: generator.has(5.0))
            again.running[0].cancel()
            await asyncio.wait(again.running)
            again.sender.close()
