"""Connections of ZeroMQ: CURVE keys encrypt them and authenticate both ends; a client makes one
that is lost anew.

    FOLDER/  server.secret  server.public     the buffer and the learner need all of them
             client.secret  client.public     generators need all but server.secret

The buffer serves `buffer.url` with them, the learner `weights.address`; both settings take the
folder from `buffer.curve`.

Invariant: an address that other machines can reach is neither served nor connected to without
keys.
"""

from pathlib import Path
from socket import AF_INET6
from typing import Any

import zmq

from streamrl.config.addresses import family_of, host_of, lacks_keys
from streamrl.durable_files import open_private
from streamrl.errors import ConfigError

LOST_S = 10
"""A connection whose peer has taken in nothing for so long is lost."""


def make_keys(folder: Path) -> None:
    """Make both pairs, readable by the owner only. Raises ConfigError if keys are there already."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for owner in ("server", "client"):
        public, secret = zmq.curve_keypair()
        for kind, key in (("public", public), ("secret", secret)):
            path = folder / f"{owner}.{kind}"
            try:
                with open(path, "xb", opener=open_private) as file:
                    file.write(key + b"\n")
            except FileExistsError as error:
                raise ConfigError(f"{path} exists; it is not written over") from error


class CurveServer:
    """The server's side: its own key, and the one that it accepts. `setting` has the URL.

    One for each context: ZeroMQ asks one authenticator in it.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        url: str,
        folder: Path | None,
        setting: str = "buffer.url",
    ) -> None:
        if why := lacks_keys(setting, url, folder):
            raise ConfigError(why)
        self._url = url
        self._folder = folder
        self._context = context
        self._authenticator: Any = None
        self._accepted = b"" if folder is None else read_key(folder, "client.public")

    def configure(self, socket: "zmq.Socket[Any]") -> None:
        """Set the keys of a socket that is not yet bound, and the address family of its URL."""
        choose_family(socket, self._url)
        if self._folder is None:
            return
        from zmq.auth.thread import ThreadAuthenticator

        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, read_key(self._folder, "server.secret"))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, read_key(self._folder, "server.public"))
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator for every client that knows the server's key."""
        return key == self._accepted

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


def set_client_keys(
    socket: "zmq.Socket[Any]", url: str, folder: Path | None, setting: str = "buffer.url"
) -> None:
    """Set the keys of a client's socket that is not yet connected to the URL in `setting`, and the
    address family of the URL."""
    choose_family(socket, url)
    if why := lacks_keys(setting, url, folder):
        raise ConfigError(why)
    if folder is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, read_key(folder, "server.public"))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, read_key(folder, "client.public"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, read_key(folder, "client.secret"))


def reconnect_soon(socket: "zmq.Socket[Any]") -> None:
    """Make a client's connection anew where it is lost without a word, as in a network that is cut:
    the system alone goes on with the one there was for a quarter of an hour, and less and less
    often."""
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * LOST_S)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000 * LOST_S)


def choose_family(socket: "zmq.Socket[Any]", url: str) -> None:
    """ZeroMQ takes an IPv6 address with this option only; with it a name such as localhost would be
    its IPv6 address alone."""
    if family_of(host_of(url)) == AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)


def serve_with_new_key(socket: "zmq.Socket[Any]") -> str:
    """Make a key for a server's socket that is not yet bound. Only those who are told the public
    half, which is returned, can connect: no handshake begins without it."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    return public.decode()


def use_key(socket: "zmq.Socket[Any]", key: str) -> None:
    """Set the key that `serve_with_new_key` returned, at a socket that is not yet connected."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def read_key(folder: Path, name: str) -> bytes:
    """Raise ConfigError if the file cannot be read, or holds no key."""
    path = folder / name
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"buffer.curve: cannot read {path} ({error.strerror}); `streamrl keys new FOLDER` "
            "makes the keys"
        ) from error
    if len(key) != 40:
        raise ConfigError(f"buffer.curve: {path} holds no key of 40 characters")
    return key
