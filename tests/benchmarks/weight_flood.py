"""Floods of the weight port: messages of a stranger without end, as fast as it takes them.

    PYTHONPATH=. python tests/benchmarks/weight_flood.py ADDRESS KIND

KIND is a row of FLOODS; RECEIVER is the name of a receiver of the run. Waits a moment where the
connection takes no more; ends with a signal. `bench_weight_flood` starts it beside a run.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

import zmq

from streamrl import wire
from streamrl.types import LoadReport, Locality
from streamrl.weights.locality import this_host
from streamrl.weights.protocol import Failed, Hello, Leave, Loaded

Frames = list[bytes]
RECEIVER = "generator-0"
PAUSE_S = 0.001
NUM_ATTEMPTS = 3000
REPORT = LoadReport(transfer_s=0.0, pause_s=0.0)


def malformed() -> Iterator[Frames]:
    return itertools.repeat([b"nonsense"])


def frames() -> Iterator[Frames]:
    return itertools.repeat([b"two", b"frames"])


def huge() -> Iterator[Frames]:
    return itertools.repeat([bytes(2**20)])


def failed() -> Iterator[Frames]:
    """Answers in the name of a receiver, to what it may be asked."""
    attempts = itertools.cycle(range(NUM_ATTEMPTS))
    return ([wire.encode(Failed(RECEIVER, attempt, "spoofed"))] for attempt in attempts)


def loaded() -> Iterator[Frames]:
    attempts = itertools.cycle(range(NUM_ATTEMPTS))
    return ([wire.encode(Loaded(RECEIVER, attempt, REPORT))] for attempt in attempts)


def leave() -> Iterator[Frames]:
    return itertools.repeat([wire.encode(Leave(RECEIVER))])


def spoofed() -> Iterator[Frames]:
    """Registers as a receiver that is there."""
    return itertools.repeat([wire.encode(Hello(RECEIVER, "guessed", 0, ""))])


def pretended() -> Iterator[Frames]:
    """Registers as one more on this machine, and never answers."""
    locality = Locality(host=this_host())
    return itertools.repeat([wire.encode(Hello("pretender", "mine", 0, "", locality))])


FLOODS: dict[str, Callable[[], Iterator[Frames]]] = {
    made.__name__: made
    for made in (malformed, frames, huge, failed, loaded, leave, spoofed, pretended)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("kind", choices=FLOODS)
    arguments = parser.parse_args()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(arguments.address)
    for message in FLOODS[arguments.kind]():
        while not send(socket, message):
            time.sleep(PAUSE_S)


def send(socket: "zmq.Socket[bytes]", message: Frames) -> bool:
    """Whether the connection took it; what the learner sends is read and thrown away."""
    while socket.poll(0):
        socket.recv_multipart()
    try:
        socket.send_multipart(message, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


if __name__ == "__main__":
    main()
