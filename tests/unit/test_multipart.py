"""Messages of several parts, and the replies that share one."""

import zmq

from buffers import messages as m
from buffers.zmq import multipart
from buffers.zmq.multipart import divided, joined
from buffers.zmq.server import Replies
from streamrl import wire
from streamrl.errors import StorageError

DONE = m.Done()


class Socket:
    """What was sent, by message."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = [[]]

    def send(self, frame: bytes, flags: int, copy: bool) -> None:
        self.messages[-1].append(bytes(frame))
        if not flags & multipart.MORE:
            self.messages.append([])


def parts(*frames: bytes) -> list[list[bytes]]:
    return [[*map(bytes, part)] for part in divided(map(zmq.Frame, frames))]


def test_parts_come_back_as_they_were_joined():
    requests = [[b"1", b"a"], [b"2", b"b", b"payload"], [b"3", b"c"]]
    assert parts(*joined(requests)) == requests


def test_a_single_request_is_a_message_as_it_is():
    assert joined([[b"1", b"a"]]) == [b"1", b"a"]
    assert parts(b"1", b"a", b"") == [[b"1", b"a"]]


def test_any_frames_are_parts_and_never_too_many():
    assert parts() == parts(b"", b"", b"") == []
    assert parts(b"", b"1", b"", b"", b"2") == [[b"1"], [b"2"]]
    assert len(parts(*[b"1", b""] * 1000)) == multipart.MAX_PARTS


def sent(replies: Replies, refusal: StorageError | None = None) -> list[list[bytes]]:
    socket = Socket()
    replies.send(socket, refusal)
    return socket.messages[:-1]


def test_requests_of_one_message_are_answered_in_one():
    done, replies = wire.encode(DONE), Replies()
    for message in ((b"1", b"2"), (b"3",)):
        replies.begin_message()
        for request_id in message:
            replies.add(b"sender", request_id, DONE, is_reading=False)
    replies.begin_message()
    for sender, request_id in ((b"sender", b"4"), (b"other", b"1"), (b"sender", b"5")):
        replies.add(sender, request_id, DONE, b"payload", is_reading=False)
    assert sent(replies) == [
        [b"sender", b"1", done, b"", b"2", done],
        [b"sender", b"3", done],
        [b"sender", b"4", done, b"payload", b"", b"5", done, b"payload"],
        [b"other", b"1", done, b"payload"],
    ]
    assert sent(replies) == []


def test_a_failed_commit_refuses_all_but_what_reads():
    refusal, replies = StorageError("full"), Replies()
    replies.begin_message()
    replies.add(b"sender", b"1", DONE, b"payload", is_reading=False)
    replies.add(b"sender", b"2", DONE, b"payload", is_reading=True)
    refused = wire.encode(m.ErrorReply.of(refusal))
    kept = [b"2", wire.encode(DONE), b"payload"]
    assert sent(replies, refusal) == [[b"sender", b"1", refused, b"", *kept]]
