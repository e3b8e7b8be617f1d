"""`zmq://`, the client: asynchronous calls over one DEALER socket.

Invariant: a call returns the server's answer, raises the error the server named, or raises
TransportError at its deadline; it never hangs. An unanswered request is sent again: at once when
the server was away and is back, else each time with twice the patience; and so is one that the
server refused because its disk is full. The ledger makes repeating harmless. At most MAX_PUTS
payloads are under way at once, so that a slow server is not sent what it has not read yet a second
time.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers.zmq import messages as m
from buffers.zmq import multipart
from buffers.zmq.curve import show_keys
from streamrl import wire
from streamrl.errors import StorageError, TransportError
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    Loan,
    PackedGroup,
    SchedulingState,
    TrajectoryGroup,
    pack,
)

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
MAX_PUTS = 4
REFUSED_S = 0.5
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqBuffer:
    """Implements `streamrl.interfaces.TrajectoryBuffer` against a `ZmqBufferServer`.

    `deadline_s` bounds how long a call goes unanswered beyond what it asked to wait. `curve` is the
    folder of the keys, if the server has some.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 60.0,
        retry_s: float = 5.0,
        curve: Path | None = None,
    ) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._retry_s = retry_s
        self._learner_term = 0
        self._ids = itertools.count()
        self._answers: dict[bytes, asyncio.Future[list[memoryview] | None]] = {}
        self._was_lost = self._is_refused = False
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Until the server is there, requests wait here, under the caller's deadline.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        show_keys(self._socket, url, curve)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(url.replace("zmq://", "tcp://"))
        # zmq.asyncio costs more than the call itself; this is the part of it we need.
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        # A descriptor tells of nothing new before what is there has been asked for.
        self._read()
        self._watch()

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float
    ) -> tuple[Lease, ...]:
        request = m.LeaseRequest(tuple(lease_ids), generator_id, wait_s)
        return (await self._call(request, m.LeaseReply, wait_s))[0].leases

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        async with self._puts:
            await self._call(m.PutRequest(lease_id), m.Done, 0.0, wire.encode(pack(group)))

    async def release(self, lease_id: str, reason: DropReason) -> None:
        await self._call(m.ReleaseRequest(lease_id, reason), m.Done)

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        return (await self._call(m.HeartbeatRequest(status), m.HeartbeatAnswer))[0].reply

    async def attach(self, policy_version: int, books: Books | None) -> BufferStats:
        request = m.AttachRequest(policy_version, books, uuid.uuid4().hex)
        reply, _ = await self._call(request, m.AttachReply)
        self._learner_term = reply.learner_term
        return reply.stats

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
    ) -> Loan:
        term = self._learner_term
        request = m.TakeRequest(num_groups, policy_version, term, wait_s, with_payloads)
        reply, payloads = await self._call(request, m.TakeReply, wait_s)
        return Loan(headers=reply.headers, groups=_groups(payloads))

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        return _groups((await self._call(m.FetchRequest(tuple(prompt_indices)), m.Done))[1])

    async def advance(self, policy_version: int) -> BufferStats:
        request = m.AdvanceRequest(policy_version, self._learner_term)
        return (await self._call(request, m.StatsReply))[0].stats

    async def acknowledge(self, policy_version: int) -> None:
        await self._call(m.AcknowledgeRequest(policy_version, self._learner_term), m.Done)

    async def finish(self) -> None:
        await self._call(m.FinishRequest(self._learner_term), m.Done)

    async def drain(self) -> None:
        await self._call(m.DrainRequest(), m.Done)

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        await self._call(m.SchedulingStateRequest(generator_id, scheduling_state), m.Done)

    async def stats(self) -> BufferStats:
        return (await self._call(m.StatsRequest(), m.StatsReply))[0].stats

    async def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    async def _call(
        self, request: Any, expected: type[Answer], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[Answer, list[memoryview]]:
        """Sends and waits for the answer; unblocked by it, by a resend, or by the deadline."""
        # The same for every attempt, so that a late answer to an earlier one is an answer too.
        request_id = next(self._ids).to_bytes(8, "little")
        frames = [request_id, wire.encode(request), *payloads]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s + self._deadline_s
        retry_timeout_s = self._retry_s
        refusal: StorageError | None = None
        while (remaining_s := deadline - loop.time()) > 0:
            answer = await self._send_and_wait(frames, min(remaining_s, wait_s + retry_timeout_s))
            if answer is not None:
                try:
                    return self._unpack(answer, expected)
                except StorageError as error:
                    log.warning("%s waits: %s", type(request).__name__, error)
                    refusal = error
                    await asyncio.sleep(min(REFUSED_S, remaining_s))
                    continue
            retry_timeout_s *= 2
            log.warning("no answer from the buffer at %s to %s", self._url, type(request).__name__)
        if refusal is not None:
            raise refusal
        raise TransportError(
            f"the buffer at {self._url} has not answered {type(request).__name__} for "
            f"{wait_s + self._deadline_s:g} s: {self._guess()}"
        )

    def _guess(self) -> str:
        """Why nobody answers."""
        if self._is_refused:
            return "it refuses the keys of this client (buffer.curve), or has none"
        return "is it running, and is buffer.url right?"

    async def _send_and_wait(
        self, frames: list[bytes], retry_timeout_s: float
    ) -> list[memoryview] | None:
        """The answer, or None if it is time to ask again."""
        answer: asyncio.Future[list[memoryview] | None] = self._loop.create_future()
        self._answers[frames[0]] = answer
        try:
            async with asyncio.timeout(retry_timeout_s):
                while not self._sent(frames):
                    self._changed.clear()
                    await self._changed.wait()
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._answers[frames[0]]

    def _unpack(
        self, frames: list[memoryview], expected: type[Answer]
    ) -> tuple[Answer, list[memoryview]]:
        reply: Any = wire.decode(frames[0] if frames else b"", m.Reply)  # type: ignore[arg-type]
        if isinstance(reply, m.ErrorReply):
            raise reply.exception()
        if not isinstance(reply, expected):
            raise TransportError(f"the buffer answered {type(reply).__name__} instead")
        return reply, frames[1:]

    def _sent(self, frames: list[bytes]) -> bool:
        """Whether there was a connection to hand the message to; never waits."""
        # The socket's descriptor tells of a change only once, and sending may have eaten it.
        self._loop.call_soon(self._read)
        try:
            multipart.send(self._socket, frames, copy=False)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        """Hands the replies that are there to their callers, and wakes who waits for a connection.

        Looks for both whatever the reason to look was: the next look would see neither again.
        """
        while not self._socket.closed:
            events = multipart.events(self._socket)
            if events & multipart.WRITABLE:
                self._changed.set()
            if not events & multipart.READABLE:
                return
            # Payloads stay in the memory they arrived in; the arrays decoded are views of it.
            request_id, *frames = (frame.buffer for frame in multipart.receive(self._socket))
            answer = self._answers.get(bytes(request_id))
            if answer is not None and not answer.done():
                answer.set_result(frames)

    def _watch(self) -> None:
        """Asks again what a server was asked that was gone and is back."""
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._was_lost = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._was_lost:
                    self._ask_again()
                self._was_lost = self._is_refused = False
            else:
                self._is_refused = True

    def _ask_again(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)


def _groups(payloads: Iterable[memoryview]) -> tuple[TrajectoryGroup, ...]:
    return tuple(wire.decode(payload, PackedGroup).group() for payload in payloads)
