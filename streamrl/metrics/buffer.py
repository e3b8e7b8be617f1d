"""Metrics of the buffer and the generators, under their public names.

Invariant: the same names at every step, so a table of them has no gaps; counts are running totals,
lengths those of a window of steps.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from streamrl.metrics.metric import STALENESS_BUCKETS, STALENESS_EDGES
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    RefusalReason,
    ResponseLengths,
    length_distance,
)


def books_metrics(books: Books) -> dict[str, float]:
    """The columns of the books: granted is the sum of all the others."""
    columns = ("granted", "leased", "buffered", "taken", "trained", "acknowledged")
    return {
        **{f"buffer/{name}": getattr(books, name) for name in columns},
        **{f"buffer/dropped_{reason}": books.dropped.get(reason, 0) for reason in DropReason},
        "buffer/failed_groups_frac": books.dropped.get(DropReason.FAILED, 0) / max(1, books.ended),
        "buffer/uniform_groups_frac": books.dropped.get(DropReason.UNIFORM, 0)
        / max(1, books.ended),
        "buffer/books_balanced": float(books.balanced),
    }


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    """The buffer's size and refusals, and the generators that report to it."""
    generators = stats.generators
    return {
        **{f"buffer/refused_{reason}": stats.refused.get(reason, 0) for reason in RefusalReason},
        "buffer/num_bytes": stats.num_bytes,
        "buffer/capacity": stats.capacity,
        "buffer/staleness_bound": stats.staleness_bound,
        "buffer/max_leases_per_prompt": max((p.num_leases for p in stats.retried), default=0),
        "generator/count": len(generators),
        "generator/num_active": sum(g.num_active for g in generators),
        "generator/num_waiting": sum(g.num_waiting for g in generators),
        "generator/max_num_groups": sum(g.max_num_groups for g in generators),
        "generator/num_lost_agents": sum(g.num_lost_agents for g in generators),
        **{f"generator/{g.generator_id}/tokens_per_s": _tokens_per_s(g) for g in generators},
        **{f"generator/{g.generator_id}/policy_version": g.policy_version for g in generators},
        **{
            f"generator/{g.generator_id}/heartbeat_age_s": age_s
            for g, age_s in zip(generators, stats.heartbeat_ages_s, strict=False)
        },
    }


def reward_metrics(stats: BufferStats, rewards: Iterable[str]) -> dict[str, float]:
    """Groups that each of these rewards did not score, in the generators that report now, each
    since it was started."""
    failed = {reward: 0 for reward in rewards}
    for generator in stats.generators:
        for found in generator.failed_rewards:
            count = failed.get(found.reward, 0) + found.num_failures
            failed = {**failed, found.reward: count}
    return {f"reward/{reward}/num_failures": count for reward, count in failed.items()}


def _tokens_per_s(generator: GeneratorStatus) -> float:
    """Of its last minute; NaN, which is "not measured", before it reports a token."""
    return generator.tokens_per_s if generator.num_tokens else math.nan


def sampling_metrics(num_tokens: float, seconds: float) -> dict[str, float]:
    """Of the responses that reached the buffer in this time; NaN where it has lost count."""
    return {"generator/tokens_per_s": num_tokens / max(seconds, 1e-9)}


def staleness_metrics(headers: Sequence[GroupHeader], policy_version: int) -> dict[str, float]:
    """Versions between each group's furthest token, older or newer, and the version that trains it,
    and how many groups are in each bucket. `staleness_min` is that of the newest token: below 0
    where the learner went back and trains groups of the versions that it makes again."""
    distances = [
        max(policy_version - header.oldest_version, header.newest_version - policy_version)
        for header in headers
    ]
    numbers = Counter(bisect_left(STALENESS_EDGES, distance) for distance in distances)
    return {
        "buffer/staleness_mean": sum(distances) / len(distances),
        "buffer/staleness_max": max(distances),
        "buffer/staleness_min": policy_version - max(header.newest_version for header in headers),
        **{
            f"buffer/staleness_{bucket}/num_groups": numbers[i]
            for i, bucket in enumerate(STALENESS_BUCKETS)
        },
    }


def fairness_metrics(lengths: ResponseLengths) -> dict[str, float]:
    """The lengths in tokens of the responses of a window, by outcome; 0 where there is none.

    The fractions are of the tokens that were trained or dropped in the window.
    """
    outcomes = {
        "sampled": lengths.sampled,
        "trained": lengths.trained,
        "dropped": lengths.all_dropped,
    }
    ended = max(1, lengths.trained.num_tokens + lengths.all_dropped.num_tokens)
    tokens = {reason: lengths.dropped_because(reason).num_tokens for reason in DropReason}
    return {
        **{f"fairness/{name}_length_mean": n.mean for name, n in outcomes.items()},
        **{f"fairness/{name}_length_p99": n.quantile(0.99) for name, n in outcomes.items()},
        "fairness/length_distance": length_distance(lengths.sampled, lengths.trained),
        "fairness/dropped_tokens_frac": lengths.all_dropped.num_tokens / ended,
        **{f"fairness/dropped_{reason}_tokens_frac": n / ended for reason, n in tokens.items()},
        "fairness/discarded_tokens_frac": lengths.discarded.num_tokens / ended,
    }
