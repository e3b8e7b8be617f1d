"""Metrics of the buffer and the generators, under their public names.

Invariant: the same names at every step, so a table of them has no gaps; counts are running totals.
"""

from collections.abc import Sequence

from streamrl.types import Books, BufferStats, DropReason, GroupHeader, RefusalReason


def books_metrics(books: Books) -> dict[str, float]:
    """The columns of the books: granted is the sum of all the others."""
    columns = ("granted", "leased", "buffered", "taken", "trained", "acknowledged")
    return {
        **{f"buffer/{name}": getattr(books, name) for name in columns},
        **{f"buffer/dropped_{reason}": books.dropped.get(reason, 0) for reason in DropReason},
        "buffer/books_balanced": float(books.balanced),
    }


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    """The buffer's size and refusals, and the generators that report to it."""
    generators = stats.generators
    return {
        **{f"buffer/refused_{reason}": stats.refused.get(reason, 0) for reason in RefusalReason},
        "buffer/num_bytes": stats.num_bytes,
        "buffer/max_leases_per_prompt": max((p.num_leases for p in stats.retried), default=0),
        "generator/count": len(generators),
        "generator/tokens_per_s": sum(g.tokens_per_s for g in generators),
        "generator/num_active": sum(g.num_active for g in generators),
        "generator/num_waiting": sum(g.num_waiting for g in generators),
        **{f"generator/{g.generator_id}/tokens_per_s": g.tokens_per_s for g in generators},
        **{f"generator/{g.generator_id}/policy_version": g.policy_version for g in generators},
    }


def staleness_metrics(headers: Sequence[GroupHeader], policy_version: int) -> dict[str, float]:
    """Versions between the oldest token of each group and the version that trains it."""
    distances = [abs(policy_version - header.oldest_version) for header in headers]
    return {
        "buffer/staleness_mean": sum(distances) / len(distances),
        "buffer/staleness_max": max(distances),
    }
