"""Addresses: which are valid, which stay on this machine (those need no keys), which one peers can
reach, which port is used if none is given, and how object stores are named.

The rule for ports: a process that listens itself binds port 0 and reads the port it got. A port for
another process is that of a `bound_socket`, which stays open if that process can bind beside it.
"""

import ipaddress
import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from streamrl.errors import ConfigError

LARGEST_PORT = 65_535
# Below those that systems give to connections, and to whoever listens anywhere, such as srun.
_PICKED_PORTS = range(20_000, 29_000)
_PICKS = 100
STORES = {
    "s3": "s3://BUCKET/FOLDER",
    "gs": "gs://BUCKET/FOLDER",
    "hf": "hf://buckets/USER/BUCKET/FOLDER",
    "file": "file:///FOLDER",
}
"""Forms of a folder in an object store, by scheme."""


def require_places(url: str, *, needs_port: bool) -> None:
    """Raise ValueError if a host is missing, or a port is not a number from 0 to LARGEST_PORT."""
    for host, port in places_of(url):
        if not host or set(host) & set("@* "):
            raise ValueError(f"was {url!r}; it must look like {_form(url, needs_port)}")
        if (port or needs_port) and not is_port(port):
            raise ValueError(
                f"was {url!r}; its port must be a number from 0 to {LARGEST_PORT}: "
                f"{_form(url, needs_port)}"
            )


def is_port(text: str) -> bool:
    """Whether it is a number from 0 to LARGEST_PORT; of one far longer Python makes none."""
    return text.isdecimal() and len(text) <= len(str(LARGEST_PORT)) and int(text) <= LARGEST_PORT


def _form(url: str, needs_port: bool) -> str:
    return f"{url.partition('://')[0]}://host{':port' if needs_port else '[:port]'}"


def places_of(url: str) -> Iterator[tuple[str, str]]:
    """Host and port of each address that the URL names, the port "" where it names none.

    >>> list(places_of("redis+cluster://user:***@a:1,[::1]/0"))
    [('a', '1'), ('::1', '')]
    """
    for place in url.partition("://")[2].partition("?")[0].partition("/")[0].split(","):
        address = place.rpartition("@")[2]
        if address.startswith("["):
            host, _, port = address[1:].partition("]")
            yield host, port.removeprefix(":")
        else:
            host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
            yield host, port


def host_of(url: str) -> str:
    """The first host that the URL names, without the brackets of IPv6.

    >>> host_of("zmq://[::1]:29610"), host_of("https://host/path")
    ('::1', 'host')
    """
    return next(places_of(url))[0]


def port_of(url: str) -> int:
    """The port of scheme://host:port; 0 if it is yet to be picked."""
    return int(url.rpartition(":")[2])


def require_port(setting: str, address: str) -> None:
    """Raise ConfigError if the port of the address is still to be picked."""
    if not port_of(address):
        raise ConfigError(
            f"{setting} {address} has port 0, which only `streamrl launch` resolves; daemons "
            "started on their own need a port they agree on"
        )


def url_host(host: str) -> str:
    """The host as written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def address_family(host: str) -> socket.AddressFamily:
    """The family of the address; for a name IPv6 only if it has no IPv4 address. Waits until the
    name is resolved."""
    with suppress(ValueError):
        is_6 = host != "localhost" and ipaddress.ip_address(host).version == 6
        return socket.AF_INET6 if is_6 else socket.AF_INET
    found: set[socket.AddressFamily] = set()
    with suppress(OSError):
        found = {family for family, *_ in socket.getaddrinfo(host, None)}
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`, at which peers there can reach it."""
    with socket.socket(address_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address


def bound_socket(host: str, port: int = 0) -> socket.socket:
    """A socket at the port that nobody listens at; for 0 at one that no connection and no other
    launch is given. While it is open, whoever reuses addresses, as the daemons do, can bind it too.

    Raises:
        OSError: another process listens at the port, or the address is not this machine's.
    """
    bound = socket.socket(address_family(host))
    try:
        if port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for picked in () if port else random.sample(_PICKED_PORTS, _PICKS):
            with suppress(OSError):
                bound.bind((host, picked))
                break
        else:
            bound.bind((host, port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        bound.close()
        raise
    return bound


def is_any(url: str) -> bool:
    """Whether it listens on every address of its machine, and names none for others.

    >>> is_any("zmq://0.0.0.0:29610"), is_any("zmq://[::]:29610"), is_any("zmq://10.0.0.1:29610")
    (True, True, False)
    """
    return host_of(url) in ("0.0.0.0", "::")


def is_loopback(url: str) -> bool:
    """Whether only processes of this machine reach it; a name other than localhost may be anything.

    >>> is_loopback("zmq://127.0.0.1:29610"), is_loopback("zmq://0.0.0.0:29610")
    (True, False)
    """
    host = host_of(url)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lacks_keys(setting: str, url: str, keys: Path | None) -> str:
    """Why the setting's URL may not be used with this folder of keys; "" if it may."""
    if keys is not None or is_loopback(url):
        return ""
    return (
        f"{setting}: was {url!r}, which other machines can reach; that needs keys: make them with "
        "`streamrl keys new FOLDER` and set buffer.curve to FOLDER"
    )


# The hub keeps all that was ever in a repository, so it has to be a bucket.
_IN_A_STORE = re.compile(r"(?:(?:s3|gs)://|file:///|hf://buckets/[^/@?#*]+/)/*[^/@?#*][^@?#*]*")


def _as_store(url: str) -> str:
    """Raise ValueError if it is not a folder of a store, or contains a password or a query."""
    if not _IN_A_STORE.fullmatch(url):
        raise ValueError(
            f"was {url.partition('?')[0]!r}; it must be a folder in a store, without user, "
            f"password, ?, # and * (keys come from the environment): {', '.join(STORES.values())}"
        )
    return url


StoreUrl: TypeAlias = Annotated[str, AfterValidator(_as_store)]
"""A folder in an object store."""
