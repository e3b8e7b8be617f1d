"""Messages of several frames, to and from a ZeroMQ socket.

As pyzmq's own `send_multipart` and `recv_multipart`, which turn a flag into an enum for every frame
and spend three quarters of their time on that. `buffers.zmq.server` and `buffers.zmq.client` call
this, once for each request and reply.
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
    """READABLE, WRITABLE or both; asking costs less than the exception that there is nothing."""
    return int(socket.get(zmq.EVENTS))


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], *, copy: bool) -> None:
    """Hand the message over; never waits.

    Raises:
        zmq.Again: there is no room for it, or nobody to send it to; none of it is on its way.
    """
    for frame in frames[:-1]:
        socket.send(frame, NOW | MORE, copy)
    socket.send(frames[-1], NOW, copy)


def receive(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """The message that is there, in the memory it arrived in."""
    frames = [socket.recv(NOW, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames
