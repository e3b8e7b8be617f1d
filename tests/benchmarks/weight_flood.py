"""Floods of the weight port: rows of `flood.FLOODS`, by a stranger that knows a receiver's name."""

import itertools
from collections.abc import Callable, Iterator

from streamrl import wire
from streamrl.types import LoadReport, Locality
from streamrl.weights.locality import this_host
from streamrl.weights.protocol import Failed, Hello, Leave, Loaded

Frames = list[bytes]
RECEIVER = "generator-0"
NUM_ATTEMPTS = 3000
REPORT = LoadReport(transfer_s=0.0, pause_s=0.0)


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
    made.__name__: made for made in (huge, failed, loaded, leave, spoofed, pretended)
}
