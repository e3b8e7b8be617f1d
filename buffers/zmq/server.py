"""`zmq://`, the server: one ROUTER socket around a `BufferState`.

Invariant: every request gets exactly one reply, and the reply to a change is sent after the journal
has committed it; requests that arrived together share a commit. While the journal cannot be written
(a full disk) every reply is StorageError, no group is accepted, and clients send their requests
again; the changes that the file lacks are written first when space returns. The same holds while
the journal cannot be opened; then stats are refused, too, with the reason.

A lease or take that cannot be granted yet is pending; it is answered when the state changes or its
`wait_s` is over. This is the back-pressure: no group arrives without a lease. One thread runs
`serve`; nothing else accesses the state. `serve` waits for requests, expiries and deadlines.

No message ends the server. A request that fails is refused, at its sender's cost: after a turn with
many refusals the server pauses, while the sender's queue fills and messages of others come next. An
unexpected error is also just a refusal if it left the ledger unchanged. If not, the server ends,
and continues from its journal.

Requests that shared a message get their replies in one message, in order. So do pending requests of
one connection that are answered in the same turn.

A connection is read until it has sent MAX_MALFORMED malformed messages within WINDOW_S. Then its
messages are discarded unread and unanswered for IGNORED_S. Good clients behind the same address
have their own connections. At most MAX_PEERS are remembered, those with the latest malformed
messages.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import zmq
from msgspec import Struct

from buffers import messages as m
from buffers.journal.journal import Journal
from buffers.ledger.state import BufferState
from buffers.quarantine import EventLimit, Quarantine
from buffers.zmq import multipart
from buffers.zmq.multipart import Frame
from buffers.zmq.pending_requests import PendingRequest, PendingRequests
from streamrl import wire
from streamrl.config.addresses import is_loopback
from streamrl.curve import CurveServer, choose_family, serve_with_new_key
from streamrl.errors import MessageTooLargeError, StorageError, StreamRLError, WireError
from streamrl.types import BufferStats, GroupHeader, PackedGroup, RefusalReason

log = logging.getLogger(__name__)

POLL_S = 0.2
LONGEST_TURN_S = 2 * POLL_S


class ServingClock:
    """The seconds of `clock`, counting at most LONGEST_TURN_S between two readings: while the
    server stands still it hears nobody, so no lease may expire for its holder's silence."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_s = clock()
        self._stood_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._stood_s += max(0.0, now_s - self._read_s - LONGEST_TURN_S)
        self._read_s = now_s
        return now_s - self._stood_s


ASKED_WITHIN_S = 3.0
MAX_OBSERVERS = 1024


class Observers:
    """Clients that follow a run only by its stats, as a validator does, and so must see there that
    it is over. By routing id, the latest last, at most MAX_OBSERVERS."""

    def __init__(self) -> None:
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()

    def note(self, peer: bytes, now_s: float, *, is_over: bool) -> None:
        """Note that this peer gets the stats now, or ends the run; `is_over` is what it then
        knows."""
        self._asked_s.pop(peer, None)
        if not is_over:
            self._asked_s[peer] = now_s
        if len(self._asked_s) > MAX_OBSERVERS:
            self._asked_s.popitem(last=False)

    def are_waiting(self, now_s: float) -> bool:
        """Whether somebody who does not know yet that the run is over is likely to ask again."""
        newest_s = next(reversed(self._asked_s.values()), float("-inf"))
        return now_s - newest_s < ASKED_WITHIN_S


class _Reply(Struct, frozen=True):
    """`is_reading`: the request changed nothing, so the reply needs no commit."""

    frames: list[Frame]
    is_reading: bool


class Replies:
    """The replies of one turn, by message and connection."""

    def __init__(self) -> None:
        self._replies: dict[tuple[int, bytes], list[_Reply]] = {}
        self._number = 0

    def begin_message(self) -> None:
        """From now on, replies are to requests of another message, or to pending ones."""
        self._number += 1

    def add(
        self, sender: bytes, request_id: bytes, record: Any, *payloads: Frame, is_reading: bool
    ) -> None:
        frames = [request_id, wire.encode(record), *payloads]
        self._replies.setdefault((self._number, sender), []).append(_Reply(frames, is_reading))

    def send(self, socket: "zmq.Socket[bytes]", refusal: StorageError | None) -> None:
        """Send the replies after the commit; if that failed, the refusal is sent in their place."""
        for (_, sender), replies in self._replies.items():
            parts = [
                reply.frames if refusal is None or reply.is_reading else _refused(reply, refusal)
                for reply in replies
            ]
            multipart.send(socket, [sender, *multipart.joined(parts)])
        self._replies.clear()


def _refused(reply: _Reply, refusal: StorageError) -> list[Frame]:
    return [reply.frames[0], wire.encode(m.ErrorReply.of(refusal))]


MAX_MALFORMED = 20
WINDOW_S = 10.0
IGNORED_S = 10.0
MAX_PEERS = 4096
REPORT_S = 1.0
# Limits on a turn's refusals, in number and bytes, that leave the cores to others.
MAX_REFUSED = 8
MAX_REFUSED_BYTES = 2**20


class RefusalBudget:
    """Counts the refusals of one turn; `is_spent` once they reach a limit."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._num_messages = self._num_bytes = 0

    def add(self, num_bytes: int = 0) -> None:
        self._num_messages += 1
        self._num_bytes += num_bytes

    @property
    def is_spent(self) -> bool:
        return self._num_messages >= MAX_REFUSED or self._num_bytes >= MAX_REFUSED_BYTES


class _Malformed(Struct, frozen=True):
    """The malformed messages of one connection since `since_s`."""

    since_s: float
    count: int = 0
    ignored_until_s: float = float("-inf")


class Peers:
    """Connections by routing id, the one with the latest malformed message last."""

    def __init__(self) -> None:
        self._malformed: OrderedDict[bytes, _Malformed] = OrderedDict()
        self._num_ignored = 0
        self._reported_s = float("-inf")
        self._warnings = EventLimit(burst=5, every_s=10.0)

    def ignores(self, peer: bytes, now_s: float) -> bool:
        """Whether to discard this message of the connection; counts it if so."""
        known = self._malformed.get(peer)
        if known is None or now_s >= known.ignored_until_s:
            return False
        self._num_ignored += 1
        return True

    def take_num_ignored(self, now_s: float) -> int:
        """The messages ignored since the last report, at most once every REPORT_S; otherwise 0."""
        if now_s - self._reported_s < REPORT_S:
            return 0
        num_ignored, self._num_ignored, self._reported_s = self._num_ignored, 0, now_s
        return num_ignored

    def note_malformed(self, sender: zmq.Frame, error: WireError, now_s: float) -> None:
        """Count a malformed message; `sender` is the frame with the connection's routing id."""
        peer = sender.bytes
        known = self._malformed.pop(peer, None)
        if known is None or now_s - known.since_s > WINDOW_S:
            known = _Malformed(now_s)
        is_over = known.count + 1 >= MAX_MALFORMED
        until_s = now_s + IGNORED_S if is_over else known.ignored_until_s
        self._malformed[peer] = _Malformed(known.since_s, known.count + 1, until_s)
        if len(self._malformed) > MAX_PEERS:
            self._malformed.popitem(last=False)
        if is_over and self._warnings.admits(now_s):
            log.warning(
                "a connection from %s is ignored for %g s; of %d malformed messages the last: %s%s",
                *(sender.get("Peer-Address"), IGNORED_S, MAX_MALFORMED, error),
                self._warnings.take_omitted(),
            )


Frames: TypeAlias = Sequence[Frame]
STATS_S = 1.0
SHUTDOWN_GRACE_S = 0.5
LEAVING_S = 1.5
"""Longer than the time between a generator's heartbeats."""
# The requests of one commit: more would keep the first ones waiting.
MAX_REQUESTS = 256
MAX_BYTES = 64 * 2**20
# Messages that may queue in one connection, each way; beyond that the sender waits.
MAX_QUEUED = 128
MAX_REPLIES = 1000
# A larger frame ends its connection; a smaller one that is too large is refused.
MAX_FRAME_BYTES = 2 * wire.MAX_MESSAGE_BYTES
MAX_REQUEST_BYTES = 4 * 2**20
REST_S = 0.0025


class ZmqBufferServer:
    """Serves one run's buffer at `url` (`zmq://host:port`; port 0 picks a free one).

    `open_journal` returns a journal that has recovered the `state` at the second that it is given;
    without it the state lives in memory alone. `curve` is the folder of the keys that any address
    but a loopback one needs.
    """

    def __init__(
        self,
        state: BufferState[Frame],
        url: str,
        *,
        quarantine: Path,
        open_journal: Callable[[float], Journal[Any]] | None = None,
        curve: Path | None = None,
        max_group_bytes: int = wire.MAX_MESSAGE_BYTES,
        stores_elsewhere: bool = False,
        clock: Callable[[], float] = time.monotonic,
        on_stats: Callable[[BufferStats], None] | None = None,
    ) -> None:
        """`on_stats` is called in the thread of `serve`, at most every STATS_S.

        `stores_elsewhere`: payloads are `buffers.messages.StoredGroup`. Then only those whom Redis
        tells `key`, which is new, may connect from other machines; on this one it is "".
        """
        self._state = state
        self._quarantine = Quarantine(quarantine)
        self._peers = Peers()
        self._observers = Observers()
        self._errors = EventLimit(burst=5, every_s=5.0)
        self._refusals = RefusalBudget()
        self._open_journal = open_journal
        self._journal: Journal[Any] | None = None
        self._refusal: StorageError | None = None
        self._clock = clock = ServingClock(clock)
        # No request is served before the first attempt to open it.
        self._commit()
        self._replies = Replies()
        self._max_group_bytes = max_group_bytes
        self._on_stats, self._stats_s = on_stats, clock()
        self._needed_s, self._stopped_s = clock(), math.inf
        self._pending_requests = PendingRequests()
        state.on_session_end = self._pending_requests.forget_leases
        self._context = zmq.Context()
        has_new_key = stores_elsewhere and not is_loopback(url)
        self._stores_elsewhere = stores_elsewhere
        self._curve = None if has_new_key else CurveServer(self._context, url, curve)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.SNDHWM, MAX_REPLIES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_FRAME_BYTES, 2 * max_group_bytes))
        self._socket.setsockopt(zmq.LINGER, 1000)
        self.key = ""
        if self._curve is None:
            choose_family(self._socket, url)
            self.key = serve_with_new_key(self._socket)
        else:
            self._curve.configure(self._socket)
        self._socket.bind(url.replace("zmq://", "tcp://"))
        endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.url = endpoint.replace("tcp://", "zmq://")

    def serve(self, stop: threading.Event, *, until_complete: bool = False) -> BufferStats | None:
        """Serve until `stop` is set, or until the run is complete and its observers know; then
        SHUTDOWN_GRACE_S longer, to send the last replies. If the run is over at `stop`, whoever
        does not know yet has LEAVING_S to ask.

        Waits for a request, the next expiry or the next deadline, at most POLL_S. Returns the last
        stats; None if its journal could not be opened.
        """
        try:
            while not self._is_done(stop, until_complete):
                if self._socket.poll(int(1000 * self._poll_timeout_s())):
                    self._receive_all()
                if num_ignored := self._peers.take_num_ignored(self._clock()):
                    self._state.ledger.refuse(RefusalReason.IGNORED, num_ignored)
                self._state.expire(self._clock())
                self._retry_pending()
                self._commit()
                self._replies.send(self._socket, self._refusal)
                self._show_stats()
                if self._refusals.is_spent:
                    stop.wait(REST_S)
            return None if self._is_blank else self._state.stats(self._clock())
        finally:
            self._socket.close()
            if self._curve is not None:
                self._curve.close()
            self._context.term()

    @property
    def _is_blank(self) -> bool:
        """Whether the state has yet to be recovered."""
        return self._open_journal is not None and self._journal is None

    def _show_stats(self) -> None:
        now_s = self._clock()
        # Counts of a blank state would look like those of a new run.
        if self._on_stats is not None and now_s >= self._stats_s and not self._is_blank:
            self._stats_s = now_s + STATS_S
            self._on_stats(self._state.stats(now_s))

    def _is_done(self, stop: threading.Event, until_complete: bool) -> bool:
        if not stop.is_set():
            return until_complete and self._has_ended()
        self._stopped_s = min(self._stopped_s, self._clock())
        is_late = self._clock() - self._stopped_s >= LEAVING_S
        return is_late or not self._state.is_over or self._has_ended()

    def _has_ended(self) -> bool:
        """Whether to close now: closing at once would lose replies that clients have not read."""
        now_s = self._clock()
        if not self._state.is_complete or self._observers.are_waiting(now_s):
            self._needed_s = now_s
        return now_s - self._needed_s >= SHUTDOWN_GRACE_S

    def _poll_timeout_s(self) -> float:
        now_s = self._clock()
        times = (self._pending_requests.next_deadline_s(), self._state.ledger.next_expiry_s())
        next_s = min((time_s for time_s in times if time_s is not None), default=now_s + POLL_S)
        return max(0.0, min(POLL_S, next_s - now_s))

    def _receive_all(self) -> None:
        self._refusals.start()
        num_bytes = 0
        for _ in range(MAX_REQUESTS):
            if not multipart.events(self._socket) & multipart.READABLE:
                break
            sender, *message = multipart.receive(self._socket)
            message_bytes = sum(map(len, message))
            if self._peers.ignores(sender.bytes, self._clock()):
                self._refusals.add(message_bytes)
            else:
                self._replies.begin_message()
                # A payload stays in the memory it arrived in until the group is freed.
                for part in multipart.divided(message) or [[]]:
                    self._handle(sender, part)
            num_bytes += message_bytes
            if self._refusals.is_spent or num_bytes > MAX_BYTES:
                break

    def _handle(self, sender: zmq.Frame, message: Frames) -> None:
        """`message` is [request id, request, payload]."""
        peer, request_id, frames = sender.bytes, bytes(message[0]) if message else b"", message[1:]
        try:
            request: Any = self._decode(frames)
        except WireError as error:
            self._refusals.add(sum(map(len, frames)))
            self._peers.note_malformed(sender, error, self._clock())
            self._quarantine.keep("request", frames, error)
            self._state.ledger.refuse(RefusalReason.MALFORMED)
            self._replies.add(peer, request_id, m.ErrorReply.of(error), is_reading=False)
            return
        num_bytes = sum(map(len, frames))
        answer = self._answer(lambda: self._apply(request, frames[1:]), num_bytes)
        is_reading = isinstance(request, m.StatsRequest | m.FetchRequest | m.FetchSiblingsRequest)
        if isinstance(request, m.StatsRequest | m.FinishRequest):
            self._observers.note(peer, self._clock(), is_over=self._state.is_over)
        if answer is None:
            deadline_s = self._clock() + request.wait_s
            pending = PendingRequest(peer, request_id, request, deadline_s, len(frames[0]))
            if self._pending_requests.add(pending):
                return
            answer = (_EMPTY[type(request)],)
            self._refusals.add()
        self._replies.add(peer, request_id, *answer, is_reading=is_reading)

    def _decode(self, frames: Frames) -> Any:
        data = frames[0] if frames else b""
        return wire.decode(data, m.Request, max_bytes=MAX_REQUEST_BYTES)  # type: ignore[arg-type]

    def _answer(self, apply: Callable[[], m.Answer | None], num_bytes: int = 0) -> m.Answer | None:
        """What `apply` returns for a message of `num_bytes`, or a refusal, whatever fails."""
        ledger = self._state.ledger
        revision = ledger.entries.revision
        try:
            return apply()
        except StreamRLError as error:
            refusal = error
        except Exception as error:
            if ledger.entries.revision != revision:
                raise
            if self._errors.admits(self._clock()):
                log.exception("a request failed%s", self._errors.take_omitted())
            refusal = StreamRLError(f"the buffer cannot handle this request: {error!r:.200}")
        self._refusals.add(num_bytes)
        return (m.ErrorReply.of(refusal),)

    def _apply(self, request: m.Request, frames: Frames) -> m.Answer | None:
        """The reply record and its payload frames; None if the request is pending."""
        if self._is_blank:
            self._require_space()
        if isinstance(request, m.OfRun):
            # Check first: generators of different runs may have the same name.
            request.require_run(self._state)
        match request:
            case m.LeaseRequest() | m.TakeRequest():
                return self._attempt(request)
            case m.PutRequest(lease_id):
                self._put(lease_id, frames)
                return (m.Done(),)
            case m.PutSiblingRequest():
                self._require_space()
                return request.apply(self._state, self._clock(), self._sibling(frames))
        return request.apply(self._state, self._clock())

    def _attempt(self, request: m.LeaseRequest | m.TakeRequest) -> m.Answer | None:
        if isinstance(request, m.LeaseRequest):
            self._require_space()
        answer = request.apply(self._state, self._clock())
        return None if answer[0].is_empty else answer

    def _put(self, lease_id: str, frames: Frames) -> None:
        self._require_space()
        payload = frames[0] if frames else b""
        try:
            header, kept = self._group(payload)
        except WireError as error:
            self._quarantine.keep(lease_id, [payload], error)
            self._state.ledger.refuse_malformed(lease_id)
            raise
        self._state.put(lease_id, header, kept, self._clock())

    def _group(self, payload: Frame) -> tuple[GroupHeader, Frame]:
        """The group's header, and what the state keeps of its payload."""
        if self._stores_elsewhere:
            stored = wire.decode(payload, m.StoredGroup, max_bytes=MAX_REQUEST_BYTES)
            return stored.header, stored.key
        group = wire.decode(payload, PackedGroup, max_bytes=self._max_group_bytes)
        return group.header(len(payload)), payload

    def _sibling(self, frames: Frames) -> Frame:
        """The sibling's bytes. They are checked when read: only a generator knows their form."""
        payload = frames[0] if frames else b""
        most = m.MAX_KEY_BYTES if self._stores_elsewhere else self._max_group_bytes
        if len(payload) > most:
            raise MessageTooLargeError(
                f"a sibling of {len(payload)} bytes; at most {most} are read"
            )
        return payload

    def _require_space(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _commit(self) -> None:
        """Open the journal, or commit to it; while that fails, set the refusal of every request."""
        if self._open_journal is None:
            return
        mended = "opened" if self._journal is None else "written again; nothing was lost"
        try:
            if self._journal is None:
                self._journal = self._open_journal(self._clock())
            else:
                self._journal.commit()
        except StorageError as error:
            if self._refusal is None:
                log.error("%s: nothing is taken in until it can be", error)
            self._refusal = error
        else:
            if self._refusal is not None:
                log.warning("the journal is %s", mended)
            self._refusal = None
        self._state.refusal = str(self._refusal or "")

    def _retry_pending(self) -> None:
        """Answer the pending requests that can be granted, and those past their deadline."""
        now_s = self._clock()
        self._replies.begin_message()
        ledger = self._state.ledger
        self._pending_requests.retry(self._answer_pending, lambda: ledger.num_admitted() > 0)
        for pending in self._pending_requests.overdue(now_s):
            empty = _EMPTY[type(pending.request)]
            self._replies.add(pending.sender, pending.request_id, empty, is_reading=False)

    def _answer_pending(self, pending: PendingRequest) -> bool:
        answer = self._answer(lambda: self._attempt(pending.request))
        if answer is not None:
            self._replies.add(pending.sender, pending.request_id, *answer, is_reading=False)
        return answer is not None


_EMPTY: dict[type, Any] = {m.LeaseRequest: m.LeaseReply(), m.TakeRequest: m.TakeReply()}
