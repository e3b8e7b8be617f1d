"""A buffer whose journal cannot be opened, for example on a full disk: it waits until it can.

Invariant: until then every request is refused with the reason, so that clients wait and
`streamrl status` shows it, and nothing is granted or taken in.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from buffers import messages as m
from buffers.journal.journal import Journal
from buffers.zmq import multipart
from buffers.zmq.multipart import Frame
from streamrl import wire
from streamrl.curve import CurveServer
from streamrl.errors import StorageError

log = logging.getLogger(__name__)

RETRY_S = 1.0


def wait_for_journal(
    open_journal: Callable[[], Journal], url: str, curve: Path | None, stop: threading.Event
) -> Journal | None:
    """The journal; None once `stop` is set. Tries again every RETRY_S, and refuses meanwhile.

    Raises:
        ConfigError: the journal cannot be used at all.
    """
    try:
        return open_journal()
    except StorageError as error:
        refusal = error
    log.error("%s: this buffer waits until it can be", refusal)
    with _listening(url, curve) as socket:
        while not stop.is_set():
            _refuse(socket, refusal)
            try:
                journal = open_journal()
            except StorageError as error:
                refusal = error
            else:
                log.warning("the journal is opened")
                return journal
    return None


def _refuse(socket: "zmq.Socket[bytes]", refusal: StorageError) -> None:
    """Answer with the refusal what arrives within RETRY_S."""
    reply = wire.encode(m.ErrorReply.of(refusal))
    end_s = time.monotonic() + RETRY_S
    while (remaining_s := end_s - time.monotonic()) > 0:
        if socket.poll(int(1000 * remaining_s)):
            sender, *message = multipart.receive(socket)
            parts = multipart.divided(message)
            replies: list[list[Frame]] = [[request_id, reply] for request_id, *_ in parts]
            multipart.send(socket, [sender.bytes, *multipart.joined(replies)])


@contextmanager
def _listening(url: str, curve: Path | None) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    keys = CurveServer(context, url, curve)
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        keys.configure(socket)
        socket.bind(url.replace("zmq://", "tcp://"))
        yield socket
    finally:
        socket.close()
        keys.close()
        context.term()
