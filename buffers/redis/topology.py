"""Finds the Redis server of a run: a single server, the master named by sentinels, or a cluster's
node.

    redis://user:password@host:port/db          rediss:// the same over TLS
    redis+sentinel://user:password@host:port,host/service/db
    redis+cluster://user:password@host:port,host:port          rediss+cluster:// over TLS

Invariant: all keys of a run are in one slot, so one node of a cluster holds the run at a time. The
nodes themselves name it (MOVED); if a node is lost, the next known one is asked. Nothing here
waits.
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
    """The URL without password and options, for people to read."""
    shown, password = url.partition("?")[0], urlsplit(url).password
    return shown if password is None else shown.replace(f":{password}@", ":***@", 1)


def open_client(url: str) -> "Redis":
    """Make a client without time-outs and retries of its own; call this in the loop that will use
    it."""
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
    }
    try:
        if url.startswith("redis+sentinel://"):
            return _sentinel_client(url, options)
        return Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"buffer.url {redacted(url)}: {error}") from error


class RedisTopology:
    """`client` is the client to send to; `holder` is a client whose node is known to hold the
    run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_cluster = urlsplit(url).scheme.endswith(CLUSTER)
        self._seeds = _hosts(url)
        self._node = self._seeds[0]
        self._clients: dict[str, Redis] = {}
        self.client = self._client_of(self._node)
        self.holder = None if self._is_cluster else self.client

    def follow(self, moved: exceptions.MovedError) -> None:
        """Select the node that holds the run.

        Raises:
            ConfigError: the URL is not that of a cluster.
        """
        if not self._is_cluster:
            raise ConfigError(
                f"buffer.url {redacted(self._url)}: this node of a cluster does not hold the run "
                f"({moved}); name the cluster: redis+cluster://host:port,host:port"
            )
        # A node that does not know its own address means the one that was asked.
        host = moved.host or self._node.rpartition(":")[0]
        self._select(f"{host}:{moved.port}")

    def switch_node(self, lost: "Redis") -> None:
        """The node of `lost` does not answer: select the next node of the cluster.

        If several calls fail with the same node, only the first selects another one.
        """
        if self._is_cluster and lost is self.client:
            nodes = list(dict.fromkeys((*self._seeds, *self._clients)))
            self._select(nodes[(nodes.index(self._node) + 1) % len(nodes)])

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _select(self, node: str) -> None:
        self._node = node
        self.client = self._client_of(node)

    def _client_of(self, node: str) -> "Redis":
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
    """The hosts of a URL, with their ports if given."""
    return urlsplit(url).netloc.rpartition("@")[2].split(",")


def _sentinel_client(url: str, options: dict[str, Any]) -> "Redis":
    """A client that connects to whichever node is the master at that moment."""
    parts = urlsplit(url)
    addresses = [address.partition(":") for address in _hosts(url)]
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it must end with the name of the service: /SERVICE")
    sentinels = [(host, int(port or SENTINEL_PORT)) for host, _, port in addresses]
    user: dict[str, Any] = {
        "username": parts.username and unquote(parts.username),
        "password": parts.password and unquote(parts.password),
    }
    asked = {**options, "socket_timeout": SENTINEL_S}
    sentinel = Sentinel(sentinels, sentinel_kwargs=asked)
    if parts.password:
        # A sentinel with a password has that of the servers; one without a password refuses any.
        sentinel.sentinels += Sentinel(sentinels, sentinel_kwargs={**asked, **user}).sentinels
    client: Redis = sentinel.master_for(service, db=int(db or 0), **user, **options)
    return client
