"""The replies of one turn of a server, which are sent after its commit.

Invariant: each request gets one reply; requests that shared a message get theirs in one message, in
their order. So do the pending requests of one connection that are answered in one turn.
"""

from typing import Any, TypeAlias

import zmq
from msgspec import Struct

from buffers import messages as m
from buffers.zmq import multipart
from buffers.zmq.multipart import Frame
from streamrl import wire
from streamrl.errors import StorageError

_PENDING = -1
Key: TypeAlias = tuple[int, bytes]


class _Reply(Struct, frozen=True):
    """`is_reading`: the request changed nothing, so the reply needs no commit."""

    frames: list[Frame]
    is_reading: bool


class Replies:
    """By message and connection."""

    def __init__(self) -> None:
        self._replies: dict[Key, list[_Reply]] = {}
        self._number = _PENDING

    def begin_message(self) -> None:
        """The next replies are to requests of another message."""
        self._number += 1

    def begin_pending(self) -> None:
        """The next replies are to pending requests."""
        self._number = _PENDING

    def add(
        self, sender: bytes, request_id: bytes, record: Any, *payloads: Frame, is_reading: bool
    ) -> None:
        frames = [request_id, wire.encode(record), *payloads]
        self._replies.setdefault((self._number, sender), []).append(_Reply(frames, is_reading))

    def send(self, socket: "zmq.Socket[bytes]", refusal: StorageError | None) -> None:
        """After the commit, or after it failed with the refusal, which then is the reply."""
        for (_, sender), replies in self._replies.items():
            parts = [
                reply.frames if refusal is None or reply.is_reading else _refused(reply, refusal)
                for reply in replies
            ]
            multipart.send(socket, [sender, *multipart.joined(parts)])
        self._replies.clear()


def _refused(reply: _Reply, refusal: StorageError) -> list[Frame]:
    return [reply.frames[0], wire.encode(m.ErrorReply.of(refusal))]
