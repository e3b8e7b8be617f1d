"""Floods: messages sent to a port without end, as fast as it takes them.

    PYTHONPATH=. python tests/benchmarks/flood.py URL KIND [--count N]

KIND is a row of FLOODS. Waits a moment where the connection takes no more; ends after `--count`
messages or with a signal. `bench_flood` and the system test start it beside a run.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

import zmq

from buffers import messages as m
from streamrl import wire
from tests.benchmarks import weight_flood

Frames = list[bytes]
PAUSE_S = 0.005


def malformed() -> Iterator[Frames]:
    return itertools.repeat([b"id", b"nonsense"])


def nested() -> Iterator[Frames]:
    return itertools.repeat([b"id", bytes([0x93, wire.SCHEMA_VERSION, 0]) + b"\x91" * 2000])


def refused() -> Iterator[Frames]:
    """Well-formed puts of leases that nobody holds."""
    return itertools.repeat([b"id", wire.encode(m.PutRequest("nobody/1")), b"nonsense"])


FLOODS: dict[str, Callable[[], Iterator[Frames]]] = {
    "malformed": malformed,
    "nested": nested,
    "refused": refused,
    **weight_flood.FLOODS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("kind", choices=FLOODS)
    parser.add_argument("--count", type=int, default=None)
    arguments = parser.parse_args()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(arguments.url.replace("zmq://", "tcp://"))
    print("flooding", flush=True)
    for frames in itertools.islice(FLOODS[arguments.kind](), arguments.count):
        while not send(socket, frames):
            time.sleep(PAUSE_S)
    # What waits in the socket is sent before the process ends.
    socket.close()
    zmq.Context.instance().term()


def send(socket: "zmq.Socket[bytes]", frames: Frames) -> bool:
    """Whether the connection took it; replies are read and thrown away."""
    while socket.poll(0):
        socket.recv_multipart()
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


if __name__ == "__main__":
    main()
