"""Checks over the last steps that trained responses are as long as sampled ones.

Invariant: a window has at least ten times as many steps as a group may be in flight for, so that
what is sampled and not yet trained is a small part of it.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence

from streamrl.metrics import fairness_metrics
from streamrl.types import (
    BufferStats,
    DropReason,
    GroupHeader,
    LengthHistogram,
    OverduePolicy,
    ResponseLengths,
    distance_p_value,
    length_distance,
)

log = logging.getLogger(__name__)

NUM_STEPS = 50
P_VALUE = 0.01
SHORTER = 0.95


class FairnessWindow:
    """Compares the response lengths that the buffer counts, from its stats after each step."""

    def __init__(self, stats: BufferStats, group_size: float) -> None:
        """`stats` are those returned by the attach; nothing before them counts."""
        self._group_size = group_size
        self.num_steps = max(NUM_STEPS, 10 * (stats.max_staleness + 1))
        self._totals = deque([stats.lengths], maxlen=self.num_steps + 1)
        self._discarded = LengthHistogram()
        self._steps_to_warning = 0

    def metrics(
        self, stats: BufferStats, step_s: float, headers: Sequence[GroupHeader] = ()
    ) -> dict[str, float]:
        """Metrics of the window that ends with `stats`, and of its last step, which took `step_s`
        and trained the groups with `headers`; logs a warning if training is unfair. The window
        starts again when totals fall, as after a buffer has lost its memory."""
        before = self._totals[-1].sampled.num_tokens
        discarded = (length for header in headers for length in header.discarded_lengths)
        self._discarded += LengthHistogram.of(discarded).rounded()
        lengths = stats.lengths.with_discarded(self._discarded)
        if not lengths.contains(self._totals[-1]):
            self._totals.clear()
        # NaN where the buffer has lost count.
        num_tokens = lengths.sampled.num_tokens - before if self._totals else math.nan
        self._totals.append(lengths)
        window = lengths.since(self._totals[0])
        self._steps_to_warning -= 1
        if self._steps_to_warning <= 0 and is_unfair(window, self._group_size):
            self._steps_to_warning = self.num_steps
            self._warn(window, stats.overdue)
        tokens_per_s = num_tokens / max(step_s, 1e-9)
        return {**fairness_metrics(window), "generator/tokens_per_s": tokens_per_s}

    def _warn(self, window: ResponseLengths, overdue: OverduePolicy) -> None:
        log.warning(
            "over the last %d steps trained responses have %.1f tokens in the mean, sampled ones "
            "%.1f: %.1f %% of the tokens were dropped %s",
            len(self._totals) - 1,
            window.trained.mean,
            window.sampled.mean,
            100 * fairness_metrics(window)["fairness/dropped_tokens_frac"],
            _cause(window, overdue),
        )


def _cause(window: ResponseLengths, overdue: OverduePolicy) -> str:
    """The reason for which most tokens were dropped, and what would avoid it."""
    num_tokens = {why: lengths.num_tokens for why, lengths in window.dropped.items()}
    reason = max(num_tokens, key=num_tokens.__getitem__, default=None)
    if reason is None or window.discarded.num_tokens > num_tokens[reason]:
        return "as siblings beyond generator.group_size; set generator.oversample.keep: each_reward"
    if reason is DropReason.UNIFORM:
        return "with groups whose rewards are all alike, as algorithm.dynamic_sampling says"
    if reason is DropReason.ABANDONED:
        return "with groups of versions that the learner has abandoned, as it went back"
    hint = "; set buffer.overdue: train or wait" if overdue is OverduePolicy.DROP else ""
    return f"with groups that grew too old{hint}"


def is_unfair(window: ResponseLengths, group_size: float) -> bool:
    """Whether trained responses are shorter than sampled ones because of drops.

    That is: shorter by a twentieth in the mean, and dropped lengths differ in distribution from
    trained ones at P_VALUE. (These two samples share no response, unlike sampled and trained ones.)
    Siblings of a group resemble each other and count as one.
    """
    trained, dropped = window.trained, window.all_dropped
    if trained.mean >= SHORTER * window.sampled.mean:
        return False
    num_trained, num_dropped = (int(n.num_responses / group_size) for n in (trained, dropped))
    return distance_p_value(length_distance(trained, dropped), num_trained, num_dropped) < P_VALUE
