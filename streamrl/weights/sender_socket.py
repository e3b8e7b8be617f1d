"""The learner's socket: sends announcements and transfers, and receives the answers.

Invariant: every wait for an answer has a deadline, and nobody waits for a process that has ended or
was replaced. No message ends the learner, and all of them together take at most READING_SHARE of
its time: malformed messages, and those in the name of another connection's receiver, are refused
and counted; a flood waits in its sender's queue, and ZeroMQ reads the queues in turn.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from streamrl import wire
from streamrl.curve import CurveServer
from streamrl.errors import WeightTransferError, WireError
from streamrl.types import WeightUpdate
from streamrl.weights.membership import Membership, Peer
from streamrl.weights.protocol import (
    Announce,
    Answer,
    Failed,
    FromReceiver,
    FromSender,
    Hello,
    Leave,
    Loaded,
    Ready,
    Transfer,
)

log = logging.getLogger(__name__)

LOG_S = 10.0
READING_SHARE = 0.2
BATCH = 64
MAX_MESSAGE_BYTES = 2**16
"""A larger message ends its connection."""
# The most messages queued per connection, in or out; there are few at a time.
QUEUED = 16


class SenderSocket:
    """A socket bound to `address`, whose port may be 0; keeps the membership up to date.

    `on_hello` is called after each Hello; `curve` is the folder of the keys.
    """

    def __init__(
        self,
        address: str,
        membership: Membership,
        on_hello: Callable[[Hello], None],
        curve: Path | None = None,
    ) -> None:
        self._membership = membership
        self._on_hello = on_hello
        self._attempt = 0
        self._asked: dict[int, dict[str, asyncio.Future[Answer]]] = {}
        self.num_refused = 0
        self._logged_s = -LOG_S
        self._context = zmq.asyncio.Context()
        self._curve = CurveServer(self._context, address, curve, "weights.address")
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED)
        self._curve.configure(self._socket)
        self._socket.bind(address)
        # For reading what has arrived without a future per message.
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def ask(self, updates: Mapping[Peer, WeightUpdate | None]) -> int:
        """Send each peer a Transfer, or an Announce if a broadcast is to follow; returns the
        attempt's id for `answers`."""
        self._attempt += 1
        attempt, loop = self._attempt, asyncio.get_running_loop()
        self._asked[attempt] = {peer.name: loop.create_future() for peer in updates}
        self._membership.on_asked(self._asked[attempt])
        for peer, update in updates.items():
            message: FromSender = Transfer(attempt, update) if update else Announce(attempt)
            await self._socket.send_multipart([peer.address, wire.encode(message)])
        return attempt

    async def answers(self, attempt: int, wait_s: float) -> dict[str, Answer]:
        """The answers by receiver. Waits until all have arrived, at most `wait_s`."""
        await asyncio.wait(self._asked[attempt].values(), timeout=wait_s)
        asked = self._asked.pop(attempt)
        arrived = {name: a for name, a in asked.items() if a.done() and not a.cancelled()}
        return {name: answer.result() for name, answer in arrived.items()}

    def asked(self) -> set[str]:
        """Receivers that take part in a running attempt."""
        return {name for answers in self._asked.values() for name in answers}

    def unanswered(self) -> set[str]:
        """Those of the asked receivers that have not answered yet."""
        asked = (pair for answers in self._asked.values() for pair in answers.items())
        return {name for name, answer in asked if not answer.done()}

    async def receive(self) -> None:
        """Handle the receivers' messages until cancelled, pausing as long as READING_SHARE
        demands."""
        while True:
            await self._socket.poll()
            start = time.perf_counter()
            self._read_some()
            await asyncio.sleep((time.perf_counter() - start) * (1 / READING_SHARE - 1))

    def close(self) -> None:
        self._socket.close()
        self._curve.close()
        self._context.term()

    def _read_some(self) -> None:
        """Read at most BATCH messages; never waits."""
        for _ in range(BATCH):
            try:
                frames = self._reader.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            address, *parts = frames
            try:
                self._handle(address.bytes, _message(parts))
            except (WireError, WeightTransferError) as error:
                self._refuse(_origin(frames[-1]), str(error))

    def _refuse(self, origin: str, reason: str) -> None:
        """Count a refused message; log it, if none was logged for LOG_S."""
        self.num_refused += 1
        if time.monotonic() - self._logged_s >= LOG_S:
            self._logged_s = time.monotonic()
            log.warning(
                "refused a message to the weight port from %s: %s (%d refused so far)",
                *(origin, reason, self.num_refused),
            )

    def _handle(self, address: bytes, message: FromReceiver) -> None:
        """
        Raises:
            WeightTransferError: the receiver it names is bound to another connection.
        """
        match message:
            case Hello(receiver_id):
                if not self._membership.on_hello(address, message):
                    self._expect_no_answer(receiver_id)
                self._on_hello(message)
            case Leave(receiver_id):
                if self._is_of(address, receiver_id):
                    self._membership.on_leave(receiver_id)
                    self._expect_no_answer(receiver_id)
            case Ready(name, attempt) | Loaded(name, attempt) | Failed(name, attempt):
                if self._is_of(address, name):
                    answer = self._asked.get(attempt, {}).get(name)
                    # A late answer is ignored: the next Hello says what the receiver has.
                    if answer is not None and not answer.done():
                        answer.set_result(message)

    def _is_of(self, address: bytes, name: str) -> bool:
        """Whether the connection belongs to the receiver; false if there is no such receiver."""
        bound = self._membership.address_of(name)
        if bound is not None and bound != address:
            raise WeightTransferError(f"{name!r} is bound to another connection")
        return bound is not None

    def _expect_no_answer(self, name: str) -> None:
        """The process that was asked has ended: stop waiting for its answer."""
        for answers in self._asked.values():
            if name in answers:
                answers[name].cancel()


def _message(parts: list[zmq.Frame]) -> FromReceiver:
    if len(parts) != 1:
        raise WireError(f"message of {len(parts)} frames instead of 1")
    message: FromReceiver = wire.decode(parts[0].buffer, FromReceiver)  # type: ignore[arg-type]
    return message


def _origin(frame: zmq.Frame) -> str:
    """Where the message came from, as far as the system tells."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
