"""Where the processes of several hosts find each other: `buffer.url` and `weights.address`.

Invariant: on several hosts both are addresses of hosts, with ports that are known before anything
starts, and keys protect them. Called by assign.py.
"""

from collections.abc import Sequence

from streamrl.config import RunConfig
from streamrl.config.addresses import is_any, is_loopback, places_of, port_of, url_host
from streamrl.config.cluster import HostRole
from streamrl.errors import ConfigError
from streamrl.placement.plan import Host
from streamrl.placement.seats import Seat

_PORTS: dict[HostRole, int] = {"buffer": 0, "learner": 1}
"""What is added to `cluster.first_port` for the address of a role."""
_RANKS = 2


def ranks_port(config: RunConfig) -> int:
    """Where ranks of several hosts find each other, on the host of the first one."""
    return config.cluster.first_port + _RANKS


def with_addresses(config: RunConfig, seats: Sequence[Seat]) -> RunConfig:
    """The configuration with addresses that all of the seats can use.

    Raises:
        ConfigError: the seats are on several hosts, and there are no keys, or a Redis that only
            one of them reaches.
    """
    used = {seat.host.name: seat.host for seat in seats}
    if len(used) > 1:
        _require_keys(config, len(used))
        _require_reachable_redis(config)
    if len(used) == 1 and not any(host.ssh for host in used.values()):
        return config
    address = _address(config, config.weights.address, "learner", seats)
    url = _address(config, config.buffer.url, "buffer", seats)
    weights = config.weights.model_copy(update={"address": address})
    buffer = config.buffer.model_copy(update={"url": url})
    return config.model_copy(update={"weights": weights, "buffer": buffer})


def _address(config: RunConfig, url: str, role: HostRole, seats: Sequence[Seat]) -> str:
    """The URL where the first process of the role listens; as it is, where none is of the role."""
    if all(seat.role != role for seat in seats):
        return url
    scheme, _, place = url.partition("://")
    host = place.rpartition(":")[0]
    names_none = is_loopback(url) or is_any(url)
    if names_none and len({seat.host.name for seat in seats}) > 1:
        host = url_host(_first(role, seats).address)
    return f"{scheme}://{host}:{port_of(url) or config.cluster.first_port + _PORTS[role]}"


def _first(role: HostRole, seats: Sequence[Seat]) -> Host:
    return next(seat.host for seat in seats if seat.role == role)


def _require_keys(config: RunConfig, num_hosts: int) -> None:
    if config.buffer.curve is None:
        raise ConfigError(
            f"buffer.curve: is not set, and the {num_hosts} hosts of the run need keys for what "
            "they send each other: make them with `streamrl keys new FOLDER` and set buffer.curve "
            "to FOLDER"
        )


def _require_reachable_redis(config: RunConfig) -> None:
    if config.buffer.has_daemon:
        return
    for host, _ in places_of(config.buffer.url):
        if is_loopback(f"redis://{url_host(host)}:0"):
            raise ConfigError(
                f"buffer.url: was {config.buffer.url!r}, which is another machine on each host of "
                "the run: name the one that Redis runs on"
            )
