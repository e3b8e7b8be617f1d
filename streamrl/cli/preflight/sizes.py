"""Settings that can work and often will not: groups that do not fit, leases that are short."""

from collections.abc import Iterator

from streamrl.cli.preflight.findings import Finding, fact, warning
from streamrl.config import RunConfig

_SAFE_LEASE_S = 3.0


def check_sizes(config: RunConfig) -> Iterator[Finding]:
    buffer, longest = config.buffer, config.max_model_len
    largest = config.group_bytes(longest, num_kept=config.generator.top_k)
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
    yield from _long_trajectories(config)
    yield fact(f"buffer.max_group_bytes: a group has at most {largest / 1e6:.3g} MB")


def _long_trajectories(config: RunConfig) -> Iterator[Finding]:
    """Of several turns; those of one turn are bounded by the prompt and one completion."""
    limit = config.learner.max_tokens_per_micro_batch
    environments = {entry.environment for entry in config.entries}
    if environments != {"single_turn"} and config.max_model_len > limit:
        yield warning(
            f"learner.max_tokens_per_micro_batch: was {limit}, and generator.max_model_len allows "
            f"trajectories of {config.max_model_len} tokens: those above the limit are trained "
            "each in a micro-batch of its own, which needs more memory"
        )
