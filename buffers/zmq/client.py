"""`zmq://`, the client: asynchronous calls over one DEALER socket.

Invariant: a call returns the server's reply, raises the error that the server names, or raises
TransportError at its deadline; it never hangs. A request without a reply is sent again: at once
after a reconnection, otherwise each time after twice the timeout. A request that was refused
because the server's disk is full is sent again after growing pauses. The ledger answers a repeated
request the same way. At most MAX_PUTS payloads are sent at a time, so that a slow server does not
get one twice before it has read it.
"""

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers import messages as m
from buffers.zmq import multipart
from streamrl import wire
from streamrl.curve import reconnect_soon, set_client_keys
from streamrl.errors import ConfigError, StorageError, TransportError
from streamrl.types import PackedGroup, SiblingHeader, TrajectoryGroup, pack

log = logging.getLogger(__name__)

MAX_PUTS = 4
MESSAGE_BYTES = 2**18
REFUSED_S, LONGEST_REFUSED_S = 0.5, 4.0
STOPPED_S, MAX_STOPS = 1.0, 3
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Stops:
    """Detects that this process was stopped during a call. An attempt that ends STOPPED_S too late
    does not count, up to MAX_STOPS times: an answer may have come meanwhile."""

    def __init__(self) -> None:
        self._num_left = MAX_STOPS

    def lost_s(self, took_s: float, timeout_s: float) -> float:
        """By how much to extend the call's deadline after an attempt that took this long."""
        if took_s <= timeout_s + STOPPED_S or not self._num_left:
            return 0.0
        self._num_left -= 1
        return took_s


class ZmqBuffer(m.RequestClient):
    """Implements `streamrl.interfaces.TrajectoryBuffer` with a `ZmqBufferServer`.

    `deadline_s` is the time for a reply, in addition to the call's own `wait_s`; `retry_s` the time
    before the first repetition. `curve` is the folder of keys, if the server uses them;
    `final_version` (for a learner) and `run_name` are as in `buffers.messages.RequestClient`.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 60.0,
        retry_s: float = 5.0,
        curve: Path | None = None,
        final_version: int | None = None,
        run_name: str = "",
    ) -> None:
        super().__init__(final_version, run_name)
        self._url = url
        self._deadline_s = deadline_s
        self._retry_s = retry_s
        self._ids = itertools.count()
        self._replies: dict[bytes, asyncio.Future[list[memoryview] | None]] = {}
        self._is_disconnected = self._is_rejected = False
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._unsent: dict[bytes, list[bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if url.startswith("zmq://"):
            self._reconnect(url, lambda socket: set_client_keys(socket, url, curve))

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        async with self._puts:
            await self._call(m.PutRequest(lease_id), m.Done, 0.0, wire.encode(pack(group)))

    async def put_sibling(self, sibling: SiblingHeader, payload: bytes) -> None:
        async with self._puts:
            await super().put_sibling(sibling, payload)

    async def close(self) -> None:
        self._disconnect()

    async def _groups(
        self, prompt_indices: Sequence[int], payloads: Sequence[Any]
    ) -> tuple[TrajectoryGroup, ...]:
        groups = (wire.decode(p, PackedGroup, max_bytes=len(p)).group() for p in payloads)
        return tuple(groups)

    async def _call(
        self, request: m.Request, expected: type[m.Expected], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[m.Expected, list[memoryview]]:
        """The reply and its payload frames. Waits for them, sending again as needed, until the
        deadline."""
        # The same id for every attempt, so that a late reply to an earlier one counts, too.
        request_id = next(self._ids).to_bytes(8, "little")
        frames = [request_id, wire.encode(request), *payloads]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s + self._deadline_s
        retry_timeout_s = self._retry_s
        refusal: StorageError | None = None
        stops, refused_at_s = Stops(), math.inf
        while (remaining_s := deadline - loop.time()) > 0:
            timeout_s, begun_s = min(remaining_s, wait_s + retry_timeout_s), loop.time()
            reply = await self._send_and_wait(frames, timeout_s)
            now_s = loop.time()
            deadline += stops.lost_s(now_s - begun_s, timeout_s)
            if reply is not None:
                try:
                    return self._decode(reply, expected)
                except StorageError as error:
                    if isinstance(request, m.StatsRequest):
                        # Whoever asks for stats wants to explain why the run stalls.
                        raise
                    log.warning("%s waits: %s", type(request).__name__, error)
                    refusal, refused_at_s = error, min(refused_at_s, now_s)
                    # The longer the disk has been full, the longer the pause, with jitter: a
                    # thousand clients send their groups again. The last attempt comes before the
                    # deadline.
                    pause_s = min(max(REFUSED_S, (now_s - refused_at_s) / 2), LONGEST_REFUSED_S)
                    left_s = deadline - now_s
                    last_s = left_s - REFUSED_S if left_s > REFUSED_S else left_s
                    await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), last_s))
                    continue
            retry_timeout_s *= 2
            log.warning("no answer from the buffer at %s to %s", self._url, type(request).__name__)
        if refusal is not None:
            raise refusal
        raise TransportError(
            f"the buffer at {self._url} has not answered {type(request).__name__} for "
            f"{wait_s + self._deadline_s:g} s: {self._likely_cause()}"
        )

    def _likely_cause(self) -> str:
        if self._is_rejected:
            return "it refuses the keys of this client (buffer.curve), or has none"
        return "is it running, and is buffer.url right?"

    async def _send_and_wait(
        self, frames: list[bytes], retry_timeout_s: float
    ) -> list[memoryview] | None:
        """The reply, or None if the request is to be sent again."""
        reply: asyncio.Future[list[memoryview] | None] = self._loop.create_future()
        self._replies[frames[0]] = reply
        if not self._unsent:
            # Later in this turn, once every ready call has added its request: they share a message.
            self._loop.call_soon(self._send_all)
        self._unsent[frames[0]] = frames
        try:
            async with asyncio.timeout(retry_timeout_s):
                return await reply
        except TimeoutError:
            return None
        finally:
            del self._replies[frames[0]]
            self._unsent.pop(frames[0], None)

    def _reconnect(self, url: str, set_keys: Callable[["zmq.Socket[bytes]"], None]) -> None:
        """Switch to the server at `url`, and send the open requests there.

        `set_keys` sets the keys of a socket that is not yet connected.
        """
        self._disconnect()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        reconnect_soon(socket)
        # Without a connection, requests wait in `_send_and_wait` until the caller's deadline.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            set_keys(socket)
        except ConfigError:
            socket.close()
            raise
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        socket.connect(url.replace("zmq://", "tcp://"))
        self._socket, self._monitor = socket, monitor
        # zmq.asyncio costs more than the call itself; this is the part that is needed.
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.add_reader(monitor.fileno(), self._read_monitor)
        # The descriptors signal only what is new since the last look.
        self._read()
        self._read_monitor()
        self._resend_all()

    def _disconnect(self) -> None:
        if self._socket is None or self._monitor is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._socket = self._monitor = None

    def _decode(
        self, frames: list[memoryview], expected: type[m.Expected]
    ) -> tuple[m.Expected, list[memoryview]]:
        reply: Any = wire.decode(frames[0] if frames else b"", m.Reply)  # type: ignore[arg-type]
        if isinstance(reply, m.ErrorReply):
            raise reply.exception()
        if not isinstance(reply, expected):
            raise TransportError(f"the buffer answered {type(reply).__name__} instead")
        return reply, frames[1:]

    def _send_all(self) -> None:
        """Send the unsent requests, if there is a connection; never waits."""
        if self._socket is None:
            return
        # The socket's descriptor signals a change only once, and sending may have consumed the
        # signal.
        self._loop.call_soon(self._read)
        while self._unsent:
            requests = self._next_requests()
            try:
                multipart.send(self._socket, multipart.joined(requests))
            except zmq.Again:
                return
            for request_id, *_ in requests:
                del self._unsent[request_id]

    def _next_requests(self) -> list[list[bytes]]:
        """The requests for the next message: one, or several of at most MESSAGE_BYTES together."""
        chosen: list[list[bytes]] = []
        num_bytes = 0
        for frames in self._unsent.values():
            num_bytes += sum(map(len, frames))
            if chosen and (num_bytes > MESSAGE_BYTES or len(chosen) == multipart.MAX_PARTS):
                break
            chosen.append(frames)
        return chosen

    def _read(self) -> None:
        """Pass arrived replies to their callers, and notice a new connection.

        Does both at each call: the descriptor signals neither twice.
        """
        while self._socket is not None:
            events = multipart.events(self._socket)
            if events & multipart.WRITABLE and self._unsent:
                self._send_all()
            if not events & multipart.READABLE:
                return
            # Payloads stay in the memory they arrived in; decoded arrays are views of it.
            for request_id, *frames in multipart.divided(multipart.receive(self._socket)):
                reply = self._replies.get(bytes(request_id))
                if reply is not None and not reply.done():
                    reply.set_result(frames)

    def _read_monitor(self) -> None:
        """Send the open requests again after a reconnection."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._is_disconnected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._is_disconnected:
                    self._resend_all()
                self._is_disconnected = self._is_rejected = False
            else:
                self._is_rejected = True

    def _resend_all(self) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)
