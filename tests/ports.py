"""A loopback port of a test's own, for a server that cannot be told to choose one."""

import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

# Below those that Linux gives to connections and to whoever binds port 0, and those that a launch
# picks; a slice for each worker of pytest.
_FIRST, _SLICE, _NUM_SLICES = 10_000, 1_000, 10


def free_port(count: int = 1) -> int:
    """One that nobody listens on, nor any other test; it comes again after all of the slice. With a
    count, the first of so many in a row."""
    for port in itertools.islice(_ports(), _SLICE):
        if all(map(is_free, range(port, port + count))):
            return port
    raise AssertionError("no port of this worker's slice is free")


@functools.cache
def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw"))
    first = _FIRST + _SLICE * (worker % _NUM_SLICES)
    return itertools.cycle(random.sample(range(first, first + _SLICE), _SLICE))


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False
