"""The messages of the learner's end: announcements and transfers, and the answers to them.

Invariant: every answer is waited for with a deadline, and one from a process that has ended or was
replaced is not waited for.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import zmq
import zmq.asyncio

from streamrl import wire
from streamrl.errors import WireError
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


class SenderSocket:
    """Bound to `address`, whose port may be `*`; keeps the membership up to date.

    `on_hello` is called after each Hello.
    """

    def __init__(self, address: str, membership: Membership, on_hello: Callable[[], None]) -> None:
        self._membership = membership
        self._on_hello = on_hello
        self._attempt = 0
        self._asked: dict[int, dict[str, asyncio.Future[Answer]]] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def announce(self, peers: Iterable[Peer]) -> int:
        """Send Announce to the peers; the attempt, for `answers`."""
        self._attempt += 1
        await self._send(dict.fromkeys(peers, Announce(self._attempt)))
        return self._attempt

    async def transfer(self, updates: Mapping[Peer, WeightUpdate]) -> int:
        """Send each peer its Transfer; the attempt, for `answers`."""
        self._attempt += 1
        await self._send({peer: Transfer(self._attempt, u) for peer, u in updates.items()})
        return self._attempt

    async def answers(self, attempt: int, wait_s: float) -> dict[str, Answer]:
        """The answers by name of the receiver. Waits until all have arrived, `wait_s` at most."""
        await asyncio.wait(self._asked[attempt].values(), timeout=wait_s)
        asked = self._asked.pop(attempt)
        arrived = {name: a for name, a in asked.items() if a.done() and not a.cancelled()}
        return {name: answer.result() for name, answer in arrived.items()}

    def asked(self) -> set[str]:
        """Receivers that take part in an attempt under way."""
        return {name for answers in self._asked.values() for name in answers}

    def unanswered(self) -> set[str]:
        """Those of them that have not answered yet."""
        asked = (pair for answers in self._asked.values() for pair in answers.items())
        return {name for name, answer in asked if not answer.done()}

    async def receive(self) -> None:
        """Until cancelled: handle the messages of receivers, which may be silent for good."""
        while True:
            address, data = await self._socket.recv_multipart()
            try:
                message: FromReceiver = wire.decode(data, FromReceiver)  # type: ignore[arg-type]
            except WireError as error:
                log.warning("unreadable message from a receiver of weights: %s", error)
                continue
            match message:
                case Hello(receiver_id):
                    if not self._membership.on_hello(address, message):
                        self._expect_no_answer(receiver_id)
                    self._on_hello()
                case Leave(receiver_id):
                    self._membership.on_leave(receiver_id)
                    self._expect_no_answer(receiver_id)
                case Ready(name, attempt) | Loaded(name, attempt) | Failed(name, attempt):
                    answer = self._asked.get(attempt, {}).get(name)
                    if answer is not None and not answer.done():
                        answer.set_result(message)

    def close(self) -> None:
        self._socket.close()

    async def _send(self, messages: Mapping[Peer, FromSender]) -> None:
        loop = asyncio.get_running_loop()
        self._asked[self._attempt] = {peer.name: loop.create_future() for peer in messages}
        for peer, message in messages.items():
            await self._socket.send_multipart([peer.address, wire.encode(message)])

    def _expect_no_answer(self, name: str) -> None:
        """The process that was asked has ended."""
        for answers in self._asked.values():
            if name in answers:
                answers[name].cancel()
