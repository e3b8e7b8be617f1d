"""Messages of several frames, to and from a ZeroMQ socket.

A message carries one or more parts (requests or replies), divided by an empty frame: what is ready
at one moment shares a message, because each message wakes a thread at both ends. No part is empty.

`send` and `receive` do the same as pyzmq's `send_multipart` and `recv_multipart`, which spend three
quarters of their time converting a flag to an enum for every frame.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import zmq

Frame: TypeAlias = bytes | memoryview
MORE = int(zmq.SNDMORE)
NOW = int(zmq.NOBLOCK)
READABLE = int(zmq.POLLIN)
WRITABLE = int(zmq.POLLOUT)
DIVIDER = b""
MAX_PARTS = 64
# Up to this size, copying costs less than sharing memory between threads.
COPIED_BYTES = 2**16


def events(socket: "zmq.Socket[bytes]") -> int:
    """READABLE, WRITABLE or both; asking costs less than the exception if there is no message."""
    return int(socket.get(zmq.EVENTS))


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """Send the message; never waits.

    Raises:
        zmq.Again: the queue is full or there is no connection; nothing of it was sent.
    """
    for frame in frames[:-1]:
        socket.send(frame, NOW | MORE, len(frame) < COPIED_BYTES)
    socket.send(frames[-1], NOW, len(frames[-1]) < COPIED_BYTES)


def receive(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Receive an arrived message, in the memory it arrived in."""
    frames = [socket.recv(NOW, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames


def joined(parts: Iterable[Sequence[Frame]]) -> list[Frame]:
    """The frames of one message with these parts; at most MAX_PARTS requests."""
    frames: list[Frame] = []
    for part in parts:
        if frames:
            frames.append(DIVIDER)
        frames += part
    return frames


def divided(frames: Iterable[zmq.Frame]) -> list[list[memoryview]]:
    """The parts of a message, at most MAX_PARTS, in the memory they arrived in."""
    parts: list[list[memoryview]] = [[]]
    for frame in frames:
        data = frame.buffer
        if len(data):
            parts[-1].append(data)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part][:MAX_PARTS]
