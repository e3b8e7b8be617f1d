"""ZeroMQ connections: CURVE keys encrypt them and authenticate both ends; clients reconnect.

    FOLDER/  server.secret  server.public     the buffer and the learner need all of them
             client.secret  client.public     generators need all except server.secret

The buffer serves `buffer.url` with them, the learner `weights.address`; the folder of both is
`buffer.curve`.

Invariant: an address that other machines can reach is neither served nor connected to without
keys.
"""

from pathlib import Path
from socket import AF_INET6
from typing import Any

import zmq

from streamrl.config.addresses import address_family, host_of, lacks_keys, require_port
from streamrl.durable_files import open_private
from streamrl.errors import ConfigError

LOST_S = 10
"""Seconds without progress at the peer after which a connection counts as lost."""


def make_keys(folder: Path) -> None:
    """Make both key pairs, readable by their owner only. Raises ConfigError if keys exist."""
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
    """The server's side: its own key and the client key that it accepts. `setting` has the URL.

    One per context, since ZeroMQ asks one authenticator per context.
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
        """Set the keys of an unbound socket, and the address family of its URL."""
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
        """Called by the authenticator for every client that knows the server's public key."""
        return key == self._accepted

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


def set_client_keys(
    socket: "zmq.Socket[Any]", url: str, folder: Path | None, setting: str = "buffer.url"
) -> None:
    """Set the keys of a client's unconnected socket for the URL in `setting`, and the address
    family of the URL. Raises ConfigError if it has no port, or needs keys and there are none."""
    require_port(setting, url)
    choose_family(socket, url)
    if why := lacks_keys(setting, url, folder):
        raise ConfigError(why)
    if folder is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, read_key(folder, "server.public"))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, read_key(folder, "client.public"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, read_key(folder, "client.secret"))


def reconnect_soon(socket: "zmq.Socket[Any]") -> None:
    """Make a client reconnect soon after a silent loss, as when a network is cut. By itself the
    system retries the old connection for a quarter of an hour, less and less often."""
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * LOST_S)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000 * LOST_S)


def choose_family(socket: "zmq.Socket[Any]", url: str) -> None:
    """Set ZeroMQ's IPv6 option if the URL needs it. It is not always set, since with it a name such
    as localhost would mean only its IPv6 address."""
    if address_family(host_of(url)) == AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)


def serve_with_new_key(socket: "zmq.Socket[Any]") -> str:
    """Make a new key for a server's unbound socket, and return its public half. Only clients that
    know it can connect: no handshake begins without it."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    return public.decode()


def use_key(socket: "zmq.Socket[Any]", key: str) -> None:
    """Use the key that `serve_with_new_key` returned, for an unconnected socket."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def read_key(folder: Path, name: str) -> bytes:
    """The key in the file; ConfigError if it cannot be read or holds no key."""
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
