"""Where the Redis of a run is: one server, the master that sentinels name, or a cluster's node.

    redis://user:password@host:port/db          rediss:// the same over TLS
    redis+sentinel://user:password@host:port,host/service/db
    redis+cluster://user:password@host:port,host:port          rediss+cluster:// over TLS

Invariant: all keys of a run have one slot, so one node of a cluster holds the run at a time. Which
one that is, the nodes say themselves (MOVED); when one is lost, the others that are known are
asked. Only `buffers.redis.connection` calls it, which does the waiting.
"""

from typing import Any
from urllib.parse import unquote, urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from streamrl.errors import ConfigError

SENTINEL_PORT, SENTINEL_S = 26379, 1.0
CLUSTER = "+cluster"


def redacted(url: str) -> str:
    """The URL without its password and its options, for people to read."""
    shown, password = url.partition("?")[0], urlsplit(url).password
    return shown if password is None else shown.replace(f":{password}@", ":***@", 1)


def open_client(url: str) -> "Redis":
    """A client that neither waits nor retries by itself; call it in the loop that will use it."""
    plain: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
    }
    try:
        if url.startswith("redis+sentinel://"):
            return _found_by_sentinels(url, plain)
        return Redis.from_url(url, **plain)
    except ValueError as error:
        raise ConfigError(f"buffer.url {redacted(url)}: {error}") from error


class RedisTopology:
    """The client to send to at present. `holder` is one whose node is known to hold the run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_cluster = urlsplit(url).scheme.endswith(CLUSTER)
        self._seeds = _hosts(url)
        self._node = self._seeds[0]
        self._clients: dict[str, Redis] = {}
        self.client = self._at(self._node)
        self.holder = None if self._is_cluster else self.client

    def follow(self, moved: exceptions.MovedError) -> None:
        """Go to the node that holds the run.

        Raises:
            ConfigError: the URL does not say that it is of a cluster.
        """
        if not self._is_cluster:
            raise ConfigError(
                f"buffer.url {redacted(self._url)}: this node of a cluster does not hold the run "
                f"({moved}); name the cluster: redis+cluster://host:port,host:port"
            )
        # A node that does not know its own name means the one that was asked.
        host = moved.host or self._node.rpartition(":")[0]
        self._go_to(f"{host}:{moved.port}")

    def look_again(self, lost: "Redis") -> None:
        """Nobody answers there: ask another node of the cluster who holds the run.

        Unless it has been done: of many calls that are lost with a node, one goes on to the next.
        """
        if self._is_cluster and lost is self.client:
            nodes = list(dict.fromkeys((*self._seeds, *self._clients)))
            self._go_to(nodes[(nodes.index(self._node) + 1) % len(nodes)])

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _go_to(self, node: str) -> None:
        self._node = node
        self.client = self._at(node)

    def _at(self, node: str) -> "Redis":
        if node not in self._clients:
            self._clients[node] = open_client(self._url_of(node))
        return self._clients[node]

    def _url_of(self, node: str) -> str:
        if not self._is_cluster:
            return self._url
        parts = urlsplit(self._url)
        user = "".join(parts.netloc.rpartition("@")[:2])
        scheme = parts.scheme.removesuffix(CLUSTER)
        return parts._replace(scheme=scheme, netloc=user + node).geturl()


def _hosts(url: str) -> list[str]:
    """Each host, with its port if it has one."""
    return urlsplit(url).netloc.rpartition("@")[2].split(",")


def _found_by_sentinels(url: str, plain: dict[str, Any]) -> "Redis":
    """Whoever is the master when a connection is made."""
    parts = urlsplit(url)
    places = [place.partition(":") for place in _hosts(url)]
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it must end with the name of the service: /SERVICE")
    sentinels = [(host, int(port or SENTINEL_PORT)) for host, _, port in places]
    sentinel = Sentinel(sentinels, sentinel_kwargs={**plain, "socket_timeout": SENTINEL_S})
    user: dict[str, Any] = {
        "username": parts.username and unquote(parts.username),
        "password": parts.password and unquote(parts.password),
    }
    found: Redis = sentinel.master_for(service, db=int(db or 0), **user, **plain)
    return found
