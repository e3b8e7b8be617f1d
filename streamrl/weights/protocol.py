"""Who gets which version when: the words of the weight channel, and the receiving end.

    receiver -> sender   Hello (every HELLO_S: who, what version), Ready, Loaded, Failed, Goodbye
    sender -> receiver   Announce, then Transfer with the endpoint to receive from

One update: the sender announces to every live receiver that has another version than the newest;
those that answer Ready in time get the bytes; each reports Loaded or Failed. A joiner, a receiver
that missed an update and one that outlived its learner are all the same case: they have another
version, so the next round is for them. A receiver that exceeds a deadline is left out until its
next Hello that finds it idle.

Invariant: every wait for a peer has a deadline. Each generator owns a `WeightReceiver`; the other
end is `streamrl.weights.sender`, and the bytes move in `streamrl.weights.transports.broadcast`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import zmq
import zmq.asyncio
from msgspec import Struct, structs

from streamrl import wire
from streamrl.errors import WeightTransferError, WireError
from streamrl.types import LoadReport, Locality, TensorSpec, WeightUpdate

log = logging.getLogger(__name__)

HELLO_S = 1.0
LOAD_S = 600.0
UNKNOWN_LOCALITY = Locality()


class Hello(Struct, frozen=True, tag="hello"):
    """`history` is empty while the weights are still those the model folder held.

    `locality` is where it receives. `is_loading`: it will not read an announcement before it is
    done with the last one.
    """

    receiver_id: str
    session: str
    policy_version: int
    history: str
    locality: Locality = UNKNOWN_LOCALITY
    num_ranks: int = 1
    is_loading: bool = False


class Ready(Struct, frozen=True, tag="ready"):
    receiver_id: str
    attempt: int


class Loaded(Struct, frozen=True, tag="loaded"):
    receiver_id: str
    attempt: int
    report: LoadReport


class Failed(Struct, frozen=True, tag="failed"):
    receiver_id: str
    attempt: int
    reason: str


class Goodbye(Struct, frozen=True, tag="goodbye"):
    receiver_id: str


class Announce(Struct, frozen=True, tag="announce"):
    attempt: int
    policy_version: int
    manifest: tuple[TensorSpec, ...]


class Transfer(Struct, frozen=True, tag="transfer"):
    attempt: int
    update: WeightUpdate


Answer: TypeAlias = Ready | Loaded | Failed
FromReceiver: TypeAlias = Hello | Ready | Loaded | Failed | Goodbye
FromSender: TypeAlias = Announce | Transfer


class WeightReceiver:
    """A generator's end, in its event loop. `load` receives and loads, off the loop's thread, at
    the `locality`; a sender shares memory only with receivers of its own locality."""

    def __init__(
        self,
        address: str,
        receiver_id: str,
        session: str,
        load: Callable[[WeightUpdate], Awaitable[LoadReport]],
        *,
        locality: Locality = UNKNOWN_LOCALITY,
        num_ranks: int = 1,
    ) -> None:
        self._load = load
        self._hello = Hello(receiver_id, session, 0, "", locality, num_ranks)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(address)

    async def run(self) -> None:
        """Until cancelled: say what we have, and load what is announced."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._say_hello())
                tasks.create_task(self._follow())
        finally:
            await self._say(Goodbye(self._hello.receiver_id))
            self._socket.close()

    async def _say_hello(self) -> None:
        """Waits HELLO_S between two; never blocked by a load, which runs elsewhere."""
        while True:
            await self._say(self._hello)
            await asyncio.sleep(HELLO_S)

    async def _follow(self) -> None:
        """Waits for the learner's word; it may stay away as long as it likes."""
        while True:
            try:
                message: FromSender = wire.decode(await self._socket.recv(), FromSender)  # type: ignore[arg-type]
            except WireError as error:
                log.warning("unreadable message on the weight channel: %s", error)
                continue
            name = self._hello.receiver_id
            if isinstance(message, Announce):
                await self._say(Ready(name, message.attempt))
                continue
            self._hello = structs.replace(self._hello, is_loading=True)
            try:
                report = await self._in_time(message.update)
            except WeightTransferError as error:
                log.warning("version %d not loaded: %s", message.update.policy_version, error)
                self._hello = structs.replace(self._hello, is_loading=False)
                await self._say(Failed(name, message.attempt, str(error)))
            else:
                self._hello = structs.replace(
                    self._hello,
                    policy_version=message.update.policy_version,
                    history=message.update.history,
                    is_loading=False,
                )
                await self._say(Loaded(name, message.attempt, report))

    async def _in_time(self, update: WeightUpdate) -> LoadReport:
        """Waits for the engine, LOAD_S at most. One that hangs would go on for good with the
        weights it has; whoever runs this process starts a new one."""
        try:
            async with asyncio.timeout(LOAD_S) as deadline:
                return await self._load(update)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RuntimeError(
                f"the engine has not loaded version {update.policy_version} for {LOAD_S:g} s"
            ) from error

    async def _say(self, message: FromReceiver) -> None:
        """Without a learner there is nobody to tell; the next Hello makes up for it."""
        with contextlib.suppress(zmq.Again):
            await self._socket.send(wire.encode(message), zmq.NOBLOCK)
