"""A stranger at a port that asks for keys: what it gets, and connections without end.

    PYTHONPATH=. python tests/benchmarks/stranger.py tcp://HOST:PORT KIND [--server-public FILE]
        [--seconds S]

KIND: `plain` speaks without keys; `guessed` knows the server's public key (a leaked one) and has a
client's pair of its own; `connections` opens and closes TCP connections as fast as it can. The
first two register as a generator, over a new connection every RETRY_S, and wait for weights. Ends
after `--seconds`, or with a signal; prints one JSON line with the number of tries and of messages
that came. `bench_host_flood` and the test of ssh start it on a machine of its own.
"""

import argparse
import contextlib
import json
import socket as sockets
import time
from pathlib import Path

import zmq

from streamrl import wire
from streamrl.weights.protocol import Hello

RETRY_S = 0.02
KINDS = ("plain", "guessed", "connections")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--server-public", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.seconds
    tries = messages = 0
    while time.monotonic() < end_s:
        tries += 1
        if arguments.kind == "connections":
            connect(arguments.url)
        else:
            messages += speak(arguments.url, arguments.server_public)
    print(json.dumps({"tries": tries, "messages": messages}), flush=True)


def connect(url: str) -> None:
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        sockets.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        time.sleep(RETRY_S)


def speak(url: str, server_public: Path | None) -> int:
    """Register over a connection of its own; the number of messages that came. Waits RETRY_S."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if server_public is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.read_bytes().strip())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.connect(url)
        hello = wire.encode(Hello("generator-0", "mine", 0, ""))
        # Who is refused at once has nobody left to send to.
        with contextlib.suppress(zmq.Again):
            socket.send(hello, zmq.NOBLOCK)
        count = 0
        while socket.poll(RETRY_S * 1000):
            socket.recv_multipart()
            count += 1
        return count


if __name__ == "__main__":
    main()
