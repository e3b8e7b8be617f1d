"""The groups that failed, as a sentence: how many, why the last one did, which rows fail again;
before it how many the buffer could not read."""

from collections import Counter
from collections.abc import Iterator

from streamrl.types import BufferStats, DropReason

_NAMED = 3


def failed_groups(stats: BufferStats) -> str:
    """The sentence; "" if no group failed or was malformed.

    Books count all failures of the run; the error and the rows are those of the generators that
    report now, each since it was started.
    """
    return "; ".join([*_malformed(stats), *_failed(stats)])


def _malformed(stats: BufferStats) -> Iterator[str]:
    if num_malformed := stats.books.dropped.get(DropReason.MALFORMED, 0):
        yield (
            f"{num_malformed} of {stats.books.ended} groups were refused as malformed (see "
            "quarantine/ in the run's folder, and streamrl check)"
        )


def _failed(stats: BufferStats) -> Iterator[str]:
    if num_failed := stats.books.dropped.get(DropReason.FAILED, 0):
        yield f"{num_failed} of {stats.books.ended} groups failed"
        yield from (*_last(stats), *_rewards(stats), *_rows(stats))


def _last(stats: BufferStats) -> list[str]:
    reported = [g.last_failure for g in stats.generators if g.last_failure is not None]
    last = max(reported, key=lambda failure: failure.prompt_index, default=None)
    return [] if last is None else [f"the last one, prompt {last.prompt_index}: {last.sentence}"]


def _rewards(stats: BufferStats) -> list[str]:
    """Where there are several, those that failed, over all generators."""
    counts: Counter[str] = Counter()
    for generator in stats.generators:
        counts.update({failed.reward: failed.num_failures for failed in generator.failed_rewards})
    several = counts.most_common(_NAMED) if len(counts) > 1 else []
    return [f"reward {reward} failed {n} times" for reward, n in several]


def _rows(stats: BufferStats) -> list[str]:
    """The rows that failed more than once, over all generators."""
    counts: Counter[str] = Counter()
    for generator in stats.generators:
        counts.update({failed.row: failed.num_failures for failed in generator.failed_rows})
    return [f"{row} failed {n} times" for row, n in counts.most_common(_NAMED) if n > 1]
