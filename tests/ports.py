"""A loopback port of a test's own, for a server that cannot be told to choose one."""

import contextlib
import os
import random
import socket

# Below those that Linux gives to connections and to whoever binds port 0, and those that a launch
# picks; a slice for each worker of pytest.
_FIRST, _SLICE, _NUM_SLICES = 10_000, 1_000, 10
_TRIES = 1_000


def free_port() -> int:
    """One that nobody listens on at present, nor any other test."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw"))
    first = _FIRST + _SLICE * (worker % _NUM_SLICES)
    for _ in range(_TRIES):
        if is_free(port := random.randrange(first, first + _SLICE)):
            return port
    raise AssertionError(f"no port of {first} to {first + _SLICE - 1} is free")


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False
