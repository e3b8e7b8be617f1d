"""What anybody can send to the weight port is refused and counted, and costs the others nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from streamrl import wire
from streamrl.curve import make_keys, set_client_keys
from streamrl.errors import ConfigError
from streamrl.types import LoadReport
from streamrl.weights.locality import locality_of
from streamrl.weights.membership import Membership
from streamrl.weights.protocol import Failed, FromReceiver, Hello, Leave, Loaded, Ready
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender_socket import SenderSocket
from tests.fuzz.hostile import enveloped
from tests.unit.weights.update_run import Generator, Run, run
from tests.waiting import until

REPORT = LoadReport(transfer_s=0.0, pause_s=0.0)
NESTED = (enveloped(b"\x91" * 2000 + b"\xc0"),)
SPOOFED: list[FromReceiver] = [
    *(Failed("a", attempt, "spoofed") for attempt in range(1, 5)),
    *(Loaded("a", attempt, REPORT) for attempt in range(1, 5)),
    *(Ready("a", attempt) for attempt in range(1, 5)),
    Leave("a"),
    Hello("a", "guessed", 0, ""),
]


class Stranger:
    """A connection of its own to the weight port."""

    def __init__(self, address: str, curve: Path | None = None) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 2000)
        if curve is not None:
            set_client_keys(self.socket, address, curve)
        self.socket.connect(address)

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def say(self, message: FromReceiver) -> None:
        await self.send(wire.encode(message))


@contextlib.asynccontextmanager
async def stranger(address: str, curve: Path | None = None) -> AsyncIterator[Stranger]:
    made = Stranger(address, curve)
    try:
        yield made
    finally:
        made.socket.close()


def num_refused(started: Run) -> float:
    return started.sender.gauges()["num_refused_messages"]


@pytest.mark.parametrize(
    "frames",
    [(b"one", b"two"), (b"",), (b"", wire.encode(Leave("a"))), NESTED, (b"x",) * 1000],
    ids=["two frames", "empty", "as REQ sends", "nested", "many frames"],
)
async def test_no_message_ends_the_learner(tmp_path, frames, caplog):
    async with run(tmp_path) as started, stranger(started.sender.address) as other:
        generator, _ = started.join("a", locality_of("cpu"))
        await other.send(*frames)
        await until(lambda: num_refused(started) == 1)
        assert "refused a message to the weight port from 127.0.0.1: " in caplog.text
        started.publish(1, 1.0)
        await until(lambda: generator.has(1.0))


async def test_a_message_that_is_too_large_ends_its_connection_and_no_other(tmp_path):
    async with run(tmp_path) as started, stranger(started.sender.address) as other:
        generator, _ = started.join("a", locality_of("cpu"))
        await other.send(bytes(2**20))
        await other.send(b"small")
        started.publish(1, 1.0)
        await until(lambda: generator.has(1.0))
        assert num_refused(started) <= 1, "the large one was not read"


async def test_nobody_answers_fails_or_leaves_for_another(tmp_path, caplog):
    async with run(tmp_path, deadline_s=20) as started, stranger(started.sender.address) as other:
        generator, _ = started.join("a", locality_of("cpu"))
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        generator.open.clear()
        started.publish(1, 1.0)
        await until(lambda: generator.num_begun == 1)
        for message in SPOOFED[:7]:
            await other.say(message)
        await until(lambda: num_refused(started) == 7)
        assert "'a' is bound to another connection" in caplog.text
        gauges = started.sender.gauges()
        assert (gauges["num_receivers"], gauges["num_failed_loads"]) == (1, 0)
        assert "load_s" not in gauges, "the answer is still waited for"
        generator.open.set()
        await until(lambda: "load_s" in started.sender.gauges())
        assert generator.has(1.0)


async def test_a_flood_of_spoofed_messages_holds_up_nobody(tmp_path, caplog):
    async with run(tmp_path) as started, stranger(started.sender.address) as other:

        async def flood() -> None:
            encoded = [wire.encode(message) for message in SPOOFED]
            while True:
                for data in (*encoded, b"malformed"):
                    await other.send(data)

        generator, _ = started.join("a", locality_of("cpu"))
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        flooding = asyncio.create_task(flood())
        for version in range(1, 21):
            started.publish(version, float(version))
            await until(lambda v=version: generator.has(float(v)))
        await until(lambda: num_refused(started) > 100)
        flooding.cancel()
        gauges = started.sender.gauges()
        assert (gauges["num_fenced"], gauges["num_failed_loads"]) == (0, 0)
        assert caplog.text.count("refused a message") < 20


async def test_receivers_that_never_answer_hold_up_the_others_once(tmp_path):
    async with run(tmp_path, deadline_s=8) as started, stranger(started.sender.address) as other:
        generator, _ = started.join("a", locality_of("cpu"))
        started.publish(1, 1.0)
        await until(lambda: generator.has(1.0))

        async def pretend() -> None:
            while True:
                await other.say(Hello("pretender", "p", 0, ""))
                await asyncio.sleep(0.02)

        pretending = asyncio.create_task(pretend())
        await until(lambda: started.sender.gauges()["num_fenced"] >= 2)
        for version in range(2, 12):
            started.publish(version, float(version))
            await until(lambda v=version: generator.has(float(v)))
        pretending.cancel()
        assert started.sender.gauges()["num_fenced"] == 2


async def test_with_keys_only_those_who_have_them_are_receivers(tmp_path):
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    async with run(tmp_path, keys) as started:
        address = started.sender.address
        generator, _ = started.join("a", locality_of("cpu"))
        async with stranger(address) as plain, stranger(address, others) as wrong:
            for other in (plain, wrong):
                # A refused connection is none any more, and there is nothing to send on.
                with contextlib.suppress(zmq.Again):
                    await other.say(Hello("s", "s", 0, ""))
                    await other.send(b"malformed", b"message")
            started.publish(1, 1.0)
            await until(lambda: generator.has(1.0))
            gauges = started.sender.gauges()
            assert (gauges["num_receivers"], gauges["num_refused_messages"]) == (1, 0)


async def test_a_receiver_with_keys_takes_nothing_from_a_learner_without(tmp_path):
    make_keys(tmp_path / "keys")
    async with run(tmp_path) as started, asyncio.TaskGroup() as tasks:
        plain, _ = started.join("plain", locality_of("cpu"))
        careful = Generator(
            started.sender.address, "careful", locality_of("cpu"), tmp_path / "keys"
        )
        running = tasks.create_task(careful.receiver.run())
        started.publish(1, 1.0)
        await until(lambda: plain.has(1.0))
        assert (started.sender.gauges()["num_receivers"], careful.num_begun) == (1, 0)
        running.cancel()


async def test_off_loopback_both_ends_need_keys():
    expected = (
        r"weights.address: was 'tcp://\S+', which other machines can reach; that needs keys: make "
        "them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
    )
    with pytest.raises(ConfigError, match=expected):
        SenderSocket("tcp://0.0.0.0:29677", Membership("h"), on_hello=lambda _: None)
    with pytest.raises(ConfigError, match=expected):
        WeightReceiver("tcp://10.0.0.1:5", "a", Generator("tcp://127.0.0.1:9", "b").load)


async def test_a_receiver_needs_the_port_that_a_launch_has_picked():
    with pytest.raises(ConfigError, match=r"^weights\.address tcp://\S+:0 has port 0, which only"):
        WeightReceiver("tcp://127.0.0.1:0", "a", Generator("tcp://127.0.0.1:9", "b").load)


async def test_a_receiver_goes_on_after_messages_that_are_none(caplog):
    """A hostile sender: who took the learner's port, where there are no keys."""
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.ROUTER) as hostile:
        port = hostile.bind_to_random_port("tcp://127.0.0.1")
        generator = Generator(f"tcp://127.0.0.1:{port}", "a")
        running = asyncio.create_task(generator.receiver.run())
        address, first = await hostile.recv_multipart()
        for frames in ((b"one", b"two"), (b"",), (b"\x91" * 1000,), (first,)):
            for _ in range(100):
                await hostile.send_multipart([address, *frames])
        for _ in range(2):
            address, again = await hostile.recv_multipart()
        hello: FromReceiver = wire.decode(again, FromReceiver)
        assert isinstance(hello, Hello)
        assert hello.policy_version == 0
        running.cancel()
        await asyncio.wait([running])
    assert caplog.text.count("unreadable message from the learner") == 1
