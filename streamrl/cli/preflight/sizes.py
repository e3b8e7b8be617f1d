"""Settings that can work and often will not: groups that do not fit, leases that are short."""

from collections.abc import Iterator

from streamrl.cli.preflight.findings import Finding, fact, warning
from streamrl.config import RunConfig

_SAFE_LEASE_S = 3.0


def check_sizes(config: RunConfig) -> Iterator[Finding]:
    buffer, longest = config.buffer, config.max_model_len
    largest = config.group_bytes(longest)
    if largest > buffer.max_group_bytes:
        fitting = buffer.max_group_bytes * longest // largest
        yield warning(
            f"buffer.max_group_bytes: {buffer.max_group_bytes} refuses groups whose trajectories "
            f"have more than about {fitting} tokens each, and generator.max_model_len allows "
            f"{longest}; set {largest + largest // 8}"
        )
    if buffer.lease_ttl_s < _SAFE_LEASE_S:
        yield warning(
            f"buffer.lease_ttl_s: {buffer.lease_ttl_s:g} s: a generator that pauses for so long "
            "loses its groups"
        )
    yield fact(f"buffer.max_group_bytes: a group has at most {largest / 1e6:.3g} MB")
