"""An open file that is handed to other processes by a server."""

import errno
import os
import socket
import tempfile

from streamrl.weights.transports.shared_memory import DescriptorServer, receive_descriptor


def test_a_server_out_of_files_for_a_moment_answers_later(monkeypatch):
    accept, refusals = socket.socket.accept, iter([OSError(errno.EMFILE, "too many open files")])

    def accept_later(self: socket.socket):
        for refusal in refusals:
            raise refusal
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with tempfile.TemporaryFile() as file:
        server = DescriptorServer(os.dup(file.fileno()))
        received = receive_descriptor(str(server.path))
        assert os.path.sameopenfile(received, file.fileno())
        os.close(received)
        server.close()
    assert not list(refusals)
