"""Which addresses stay on this machine: those need no keys."""

import ipaddress


def host_of(url: str) -> str:
    """The host of scheme://host:port, without the brackets of IPv6."""
    return url.partition("://")[2].rpartition(":")[0].strip("[]")


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
