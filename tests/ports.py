"""A loopback port of a test's own, for a server that cannot be told to choose one."""

import socket


def free_port() -> int:
    """One that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
