"""Hands an open file to other processes of this user, through a socket that has a name in /dev/shm.

A descriptor that is received is the file itself, in whatever process: sender and receiver need not
see each other's process ids, so containers that share /dev/shm do as processes of one machine.

Invariant: a name is there once its socket accepts connections, which it does exactly as long as the
process that made it lives. The name of one that was killed stays until the next one is made.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from pathlib import Path

from streamrl.weights.locality import SHARED_FOLDER

log = logging.getLogger(__name__)

_NAMES = "streamrl-weights-{}.socket"
_WAIT_S = 10.0
_RETRY_S = 1.0


class DescriptorServer:
    """Gives everybody who connects to `path` the open file `fd`, which it closes in the end.

    Raises:
        OSError: there is no folder that this host's processes share.
    """

    def __init__(self, fd: int) -> None:
        _remove_abandoned()
        self._fd = fd
        self._closing = threading.Event()
        self.path = SHARED_FOLDER / _NAMES.format(secrets.token_hex(8))
        self._socket = socket.socket(socket.AF_UNIX)
        unfinished = self.path.with_suffix(".new")
        try:
            self._socket.bind(str(unfinished))
            unfinished.chmod(0o600)
            self._socket.listen(128)
            unfinished.rename(self.path)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread, which `shutdown` unblocks."""
        self.path.unlink(missing_ok=True)
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        os.close(self._fd)

    def _serve(self) -> None:
        """Waits for connections, until closed; where none can be accepted, as the process may open
        no more files, for _RETRY_S. One byte and a descriptor always fit into a new connection's
        buffer, so no receiver is waited for."""
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closing.wait(_RETRY_S):
                    log.warning("no process was given the weights' memory: %s", error)
                continue
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                socket.send_fds(connection, [b"\0"], [self._fd])


def receive_descriptor(path: str) -> int:
    """The open file that the server at the path gives; waits _WAIT_S at most.

    Raises:
        OSError: nobody is there, it is another user's, or it does not answer.
    """
    with _connect(path) as connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError(0, "its process gives no file")
    return descriptors[0]


def require_served(path: str) -> None:
    """
    Raises:
        OSError: the server's process has ended, or it is another user's.
    """
    _connect(path).close()


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_WAIT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _remove_abandoned() -> None:
    """The names of processes that were killed."""
    for path in SHARED_FOLDER.glob(_NAMES.format("*")):
        with contextlib.suppress(OSError):
            if not _is_served(path):
                path.unlink()


def _is_served(path: Path) -> bool:
    try:
        require_served(str(path))
    except ConnectionRefusedError:
        return False
    return True
