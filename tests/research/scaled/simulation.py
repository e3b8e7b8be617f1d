"""The run of a load in simulated time, in which a real ledger answers its requests.

    SimulatedTime    an asyncio loop whose clock jumps to the next timer: a sleep costs nothing
    Pipe             what carries bytes one after the other: a network link, a thread that copies
    SimulatedServer  the turns of `ZmqBufferServer`, around a real `BufferState` and real
                     `PendingRequests`; each takes the time that its requests cost

Invariant: what the ledger does is no model; its own seconds of CPU are measured as it does it, at
the size that it has then, and added to the `Costs` of everything around it. So a cost that grows
with the number of generators shows itself. Payloads are not made: a group's is its header.
"""

import asyncio
import itertools
import math
import selectors
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import Struct

from buffers import messages as m
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.pending_requests import PendingRequest, PendingRequests
from streamrl.errors import StreamRLError
from streamrl.types import GroupHeader, TrajectoryGroup
from tests.research.scaled.costs import Costs
from tests.research.scaled.load import Load, Outcome, run

MAX_REQUESTS = 256
POLL_S = 0.2
LATENCY_S = 0.0002
LEASE_TTL_S = 30.0
Reply = TypeVar("Reply")


class Network(Struct, frozen=True, kw_only=True):
    """In bytes/s, of one machine each way. `payloads_outside`: the daemon gets headers alone, and
    ranks read payloads from where they lie, each over its own link."""

    link: float = 1.25e9
    payloads_outside: bool = False


class Simulated(Struct, frozen=True, kw_only=True):
    """`busy` is the part of the time, by resource; `ledger_us` the ledger's microseconds of CPU a
    request, by kind; `took_s` the real seconds of the simulation."""

    outcome: Outcome
    busy: dict[str, float]
    ledger_us: dict[str, float]
    requests_per_s: float
    took_s: float


def simulate(load: Load, costs: Costs, network: Network) -> Simulated:
    """Deterministic but for the ledger's own seconds."""
    began_s = time.perf_counter()

    async def simulated() -> Simulated:
        server = SimulatedServer(load, costs, network)
        serving = asyncio.create_task(server.serve())
        outcome = await run(load, server.client)
        serving.cancel()
        now_s = asyncio.get_running_loop().time()
        return Simulated(
            outcome=outcome,
            busy={name: busy_s / now_s for name, busy_s in server.busy_s().items()},
            ledger_us={
                kind: 1e6 * spent_s / server.num_requests[kind]
                for kind, spent_s in sorted(server.ledger_s.items())
            },
            requests_per_s=server.num_requests.total() / now_s,
            took_s=time.perf_counter() - began_s,
        )

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(simulated())


class _Jump(selectors.SelectSelector):
    """Waits for no file; the time until the next timer passes at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits for something else"
        self.now_s += timeout
        return super().select(0.0) if timeout else []


class SimulatedTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


class Pipe:
    def __init__(self, seconds_a_byte: float) -> None:
        self._seconds_a_byte = seconds_a_byte
        self._free_at_s = 0.0
        self.busy_s = 0.0

    async def carry(self, num_bytes: float) -> None:
        """Waits until the last of these bytes is through, behind those that came before."""
        loop, took_s = asyncio.get_running_loop(), num_bytes * self._seconds_a_byte
        self._free_at_s = max(loop.time(), self._free_at_s) + took_s
        self.busy_s += took_s
        await asyncio.sleep(self._free_at_s - loop.time())


class _Message(Struct):
    sender: bytes
    request: Any
    header: GroupHeader | None
    reply: "asyncio.Future[m.Answer]"


class SimulatedServer:
    def __init__(self, load: Load, costs: Costs, network: Network) -> None:
        ledger = Ledger(groups_per_step=load.groups_per_step, max_staleness=load.max_staleness)
        self.state: BufferState[GroupHeader] = BufferState(ledger, lease_ttl_s=LEASE_TTL_S)
        self.costs, self.network = costs, network
        self._loop = asyncio.get_running_loop()
        self._pending_requests = PendingRequests()
        self._inbox: deque[_Message] = deque()
        self._arrived = asyncio.Event()
        self._waiting: dict[bytes, _Message] = {}
        self._answered: list[tuple[_Message, m.Answer]] = []
        self._numbers = itertools.count()
        self._server_s = 0.0
        self.ledger_s: defaultdict[str, float] = defaultdict(float)
        self.num_requests: Counter[str] = Counter()
        self.link_in, self.link_out = Pipe(1.0 / network.link), Pipe(1.0 / network.link)
        self.io_thread = Pipe(costs.io_byte_s)
        self.readers: list[Pipe] = []

    def client(self) -> "SimulatedClient":
        return SimulatedClient(self, next(self._numbers).to_bytes(8, "little"))

    def busy_s(self) -> dict[str, float]:
        """Seconds, by resource."""
        return {
            "server": self._server_s,
            "io thread": self.io_thread.busy_s,
            "link in": self.link_in.busy_s,
            "link out": self.link_out.busy_s,
            "reader": max((reader.busy_s for reader in self.readers), default=0.0),
        }

    def receive(self, message: _Message) -> None:
        self._inbox.append(message)
        self._arrived.set()

    async def serve(self) -> None:
        """Turns as those of `ZmqBufferServer.serve`."""
        while True:
            if not self._inbox:
                self._arrived.clear()
                wake = self._loop.call_later(self._poll_timeout_s(), self._arrived.set)
                await self._arrived.wait()
                wake.cancel()
            num_requests = min(len(self._inbox), MAX_REQUESTS)
            turn_s = self.costs.turn_s
            for message in [self._inbox.popleft() for _ in range(num_requests)]:
                turn_s += self._handle(message)
            turn_s += self._retry_pending()
            self._server_s += turn_s
            answered, self._answered = self._answered, []
            await asyncio.sleep(turn_s)
            for message, answer in answered:
                if not message.reply.done():
                    message.reply.set_result(answer)

    def _poll_timeout_s(self) -> float:
        times = (self._pending_requests.next_deadline_s(), self.state.ledger.next_expiry_s())
        now_s = self._loop.time()
        next_s = min((time_s for time_s in times if time_s is not None), default=math.inf)
        return max(1e-6, min(POLL_S, next_s - now_s))

    def _handle(self, message: _Message) -> float:
        """Answers it or lets it wait. The seconds that it cost."""
        kind = type(message.request).__name__.removesuffix("Request").lower()
        began_s = time.thread_time()
        answer = self._answer(message)
        spent_s = time.thread_time() - began_s
        self.ledger_s[kind] += spent_s
        self.num_requests[kind] += 1
        if answer is None:
            request_id = next(self._numbers).to_bytes(8, "little")
            deadline_s = self._loop.time() + message.request.wait_s
            pending = PendingRequest(message.sender, request_id, message.request, deadline_s)
            if self._pending_requests.add(pending):
                self._waiting[request_id] = message
            else:
                answer = _empty(message.request)
        if answer is not None:
            self._answered.append((message, answer))
        return spent_s + self.costs.of(kind, self._num_groups(message), self._num_bytes(message))

    def _num_groups(self, message: _Message) -> int:
        is_fetch = isinstance(message.request, m.FetchRequest)
        return len(message.request.prompt_indices) if is_fetch else 1

    def _num_bytes(self, message: _Message) -> float:
        """Of the payloads that go through the daemon."""
        if self.network.payloads_outside:
            return 0.0
        if isinstance(message.request, m.FetchRequest):
            return sum(
                header.num_bytes for header in self.state.fetch(message.request.prompt_indices)
            )
        return 0.0 if message.header is None else message.header.num_bytes

    def _answer(self, message: _Message) -> m.Answer | None:
        request, now_s = message.request, self._loop.time()
        try:
            if message.header is not None:
                self.state.put(request.lease_id, message.header, message.header, now_s)
                return (m.Done(),)
            if isinstance(request, m.HeartbeatRequest) and request.status.is_leaving:
                status = request.status
                self._pending_requests.forget_leases(status.generator_id, status.session)
            answer: m.Answer = request.apply(self.state, now_s)
        except StreamRLError as error:
            return (m.ErrorReply.of(error),)
        waits = isinstance(request, m.LeaseRequest | m.TakeRequest) and answer[0].is_empty
        return None if waits else answer

    def _retry_pending(self) -> float:
        """The seconds that it cost."""
        began_s = time.thread_time()
        self.state.expire(self._loop.time())
        ledger = self.state.ledger
        self._pending_requests.retry(self._attempt, lambda: ledger.num_admitted() > 0)
        for pending in self._pending_requests.overdue(self._loop.time()):
            message = self._waiting.pop(pending.request_id)
            self._answered.append((message, _empty(message.request)))
        spent_s = time.thread_time() - began_s
        self.ledger_s["retry"] += spent_s
        self.num_requests["retry"] += 1
        return spent_s

    def _attempt(self, pending: PendingRequest) -> bool:
        answer = self._answer(self._waiting[pending.request_id])
        if answer is not None:
            self._answered.append((self._waiting.pop(pending.request_id), answer))
        return answer is not None


def _empty(request: Any) -> m.Answer:
    return (m.LeaseReply() if isinstance(request, m.LeaseRequest) else m.TakeReply(),)


class SimulatedClient(m.RequestClient):
    """The real client's calls; its messages pass the pipes to the server and back."""

    def __init__(self, server: SimulatedServer, name: bytes) -> None:
        super().__init__()
        self._server, self._name = server, name
        self._loop = asyncio.get_running_loop()
        self._reader: Pipe | None = None

    async def put_header(self, lease_id: str, header: GroupHeader) -> None:
        if not self._server.network.payloads_outside:
            await self._server.link_in.carry(header.num_bytes)
            await self._server.io_thread.carry(header.num_bytes)
        await self._send(m.PutRequest(lease_id), header)

    async def fetch_headers(self, headers: Sequence[GroupHeader]) -> None:
        """Waits until this rank has read and decoded the payloads."""
        num_bytes = sum(header.num_bytes for header in headers)
        if not self._server.network.payloads_outside:
            await self.fetch([header.prompt_index for header in headers])
            await self._server.io_thread.carry(num_bytes)
            await self._server.link_out.carry(num_bytes)
        if self._reader is None:
            self._reader = Pipe(1.0 / self._server.network.link + self._server.costs.decode_byte_s)
            self._server.readers.append(self._reader)
        await self._reader.carry(num_bytes)

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        raise NotImplementedError("a simulated group is its header")

    async def close(self) -> None:
        """It holds nothing."""

    async def _groups(self, prompt_indices: Sequence[int], payloads: Sequence[Any]) -> Any:
        return tuple(payloads)

    async def _call(
        self, request: m.Request, expected: type[Reply], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[Reply, Sequence[Any]]:
        reply, *kept = await self._send(request)
        assert isinstance(reply, expected), reply
        return reply, kept

    async def _send(self, request: m.Request, header: GroupHeader | None = None) -> m.Answer:
        answer: asyncio.Future[m.Answer] = self._loop.create_future()
        message = _Message(self._name, request, header, answer)
        self._loop.call_later(2 * LATENCY_S, self._server.receive, message)
        reply = await answer
        if isinstance(reply[0], m.ErrorReply):
            raise reply[0].exception()
        return reply
