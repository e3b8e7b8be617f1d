"""Where the members of one gloo group find each other: their addresses, held by the sender.

torch's own store lets everybody who reaches its port list, read and write the keys. Here the
connection is encrypted with a key of this group alone, which only the announcement tells: the
server's public CURVE key, without which no handshake begins, serves as the members' secret.

Invariant: a member waits for the others' values until its timeout at most, and the server keeps
MAX_VALUES small ones. Whoever does not know the key is not read.
"""

import logging
import threading
from datetime import timedelta
from typing import TypeAlias

import zmq
from msgspec import Struct
from torch._C._distributed_c10d import Store

from streamrl import wire
from streamrl.config.addresses import url_host
from streamrl.curve import choose_family, serve_with_new_key, use_key
from streamrl.errors import WireError

log = logging.getLogger(__name__)

MAX_VALUES = 2**16
MAX_MESSAGE_BYTES = 2**16
_POLL_MS = 100


class Put(Struct, frozen=True, tag="put"):
    key: str
    value: bytes


class Fetch(Struct, frozen=True, tag="fetch"):
    """Answered when there is a value of this key."""

    key: str


class Values(Struct, frozen=True):
    """All values that are there, by key."""

    by_key: dict[str, bytes]


Request: TypeAlias = Put | Fetch


class RendezvousServer:
    """Serves one group's values at `host`:`port`, from a thread of its own, until closed."""

    def __init__(self, host: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        place = f"tcp://{url_host(host)}"
        choose_family(self._socket, place)
        self.key = serve_with_new_key(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.port: int = self._socket.bind_to_random_port(place)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[bytes, str] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Returns at once; the thread closes the socket."""
        self._stop.set()

    def _serve(self) -> None:
        """Waits for the members' requests, until closed."""
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                address, *frames = self._socket.recv_multipart()
                try:
                    self._handle(address, wire.decode(frames[-1], Request))  # type: ignore[arg-type]
                except WireError as error:
                    log.warning("unreadable message from the member of a group: %s", error)
        self._socket.close()

    def _handle(self, address: bytes, request: Request) -> None:
        match request:
            case Put(key, value):
                if len(self._values) < MAX_VALUES:
                    self._values[key] = value
                self._answer(address)
                self._answer_waiting()
            case Fetch(key):
                self._waiting[address] = key
                self._answer_waiting()

    def _answer_waiting(self) -> None:
        for address, key in list(self._waiting.items()):
            if key in self._values:
                del self._waiting[address]
                self._answer(address)

    def _answer(self, address: bytes) -> None:
        self._socket.send_multipart([address, b"", wire.encode(Values(self._values))])


class RendezvousStore(Store):
    """A member's end, as torch.distributed takes it; the caller keeps it while the group forms.

    Invariant: each call ends within `timeout_s`, by a RuntimeError if the value is not there.
    """

    def __init__(self, host: str, port: int, key: str, timeout_s: float) -> None:
        super().__init__()
        self._place = f"{url_host(host)}:{port}"
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        use_key(self._socket, key)
        choose_family(self._socket, f"tcp://{self._place}")
        self._socket.connect(f"tcp://{self._place}")

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Put(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for the value, until the timeout."""
        if key not in self._values:
            self._call(Fetch(key))
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values of all keys; the shorter of both timeouts holds for each."""
        for key in keys:
            if key not in self._values:
                self._call(Fetch(key), timeout)

    def close(self) -> None:
        self._socket.close()

    def _call(self, request: Request, timeout: timedelta | None = None) -> None:
        wait_s = min(self._timeout_s, timeout.total_seconds() if timeout else self._timeout_s)
        self._socket.send(wire.encode(request))
        if not self._socket.poll(int(1000 * wait_s)):
            raise RuntimeError(
                f"no answer from the weight sender's rendezvous at {self._place} to "
                f"{type(request).__name__} {request.key} for {wait_s:g} s"
            )
        self._values = wire.decode(self._socket.recv(), Values).by_key
