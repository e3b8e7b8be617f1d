"""Messages of several frames, to and from a ZeroMQ socket.

As pyzmq's own `send_multipart` and `recv_multipart`, which convert a flag to an enum for every
frame and spend three quarters of their time on that.
"""

from collections.abc import Sequence
from typing import TypeAlias

import zmq

Frame: TypeAlias = bytes | memoryview
MORE = int(zmq.SNDMORE)
NOW = int(zmq.NOBLOCK)
READABLE = int(zmq.POLLIN)
WRITABLE = int(zmq.POLLOUT)


def events(socket: "zmq.Socket[bytes]") -> int:
    """READABLE, WRITABLE or both; costs less than the exception where there is no message."""
    return int(socket.get(zmq.EVENTS))


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], *, copy: bool) -> None:
    """Send the message; never waits.

    Raises:
        zmq.Again: the queue is full or there is no connection; nothing of it was sent.
    """
    for frame in frames[:-1]:
        socket.send(frame, NOW | MORE, copy)
    socket.send(frames[-1], NOW, copy)


def receive(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """The message that has arrived, in the memory it arrived in."""
    frames = [socket.recv(NOW, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames
