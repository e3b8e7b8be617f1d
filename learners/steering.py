"""Steers the bound on staleness by the effective sample size of the last steps.

    1 - ESS of the last steps   learner waits for groups   the bound
    above 1 - ess               whether or not             lower, by what it is above
    below 1 - ess               yes                        higher by one
    below 1 - ess               no                         stays

Lag is worth its cost only where it saves time. With a bound b a group is sampled up to b updates
before the one that trains it, b + 1 with that one. In their number 1 - ESS grows linearly where
updates point in all directions, and quadratically where they point in one (it is about the variance
of the log-ratio). So the bound is lowered as if linearly, and raised only if 1 - ESS would stay
below its limit quadratically: between the two lies a band in which it rests, and no rise calls for
a fall. It rises by one and falls by all that it is too high (additive increase, multiplicative
decrease): a bound that is too low costs time, one that is too high costs what was learned.

After a change, groups leased under the previous bound are trained for about that many more steps;
those steps are ignored. A learner that resumes begins with its last bound, and without steps.
"""

import math
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from streamrl.config.buffer import MaxStaleness, SteeredStaleness

EFF_SAMPLE_SIZE = "mismatch/rollout_is_eff_sample_size"
NUM_STEPS = 8
"""Steps over which the means are taken."""
NUM_ERRORS = 2
"""How many standard errors a mean must be beyond its limit, so that noise changes nothing."""
MIN_WAIT_FRAC = 0.05
"""Share of its time; a learner that waits less gains nothing from a higher bound."""


@dataclass(frozen=True)
class Steering:
    """The bound, in versions, and what the steps since it changed have shown.

    `num_ignored` are the steps to come whose groups were leased under the bound before.
    """

    limits: SteeredStaleness
    bound: int
    num_ignored: int = 0
    window: tuple[tuple[float, float], ...] = ()
    """(effective sample size, share of time that the learner waited) of each step."""

    @classmethod
    def start(cls, max_staleness: MaxStaleness, bound: int) -> "Steering | None":
        """Start from the buffer's bound; None for a run with a fixed bound."""
        if not isinstance(max_staleness, SteeredStaleness):
            return None
        return cls(max_staleness, bound, bound + 1)

    def after(self, ess: float, wait_frac: float) -> "tuple[Steering, str]":
        """The state after a step with this effective sample size, in (0, 1], and this share of time
        waited for groups; and how and why the bound changed, or ""."""
        if self.num_ignored or not math.isfinite(ess):
            return replace(self, num_ignored=max(0, self.num_ignored - 1)), ""
        window = (*self.window, (ess, wait_frac))[-NUM_STEPS:]
        if len(window) < NUM_STEPS:
            return replace(self, window=window), ""
        losses, waits = zip(*((1 - size, wait) for size, wait in window), strict=True)
        mean, waited = 1 - fmean(losses), fmean(waits)
        bound = self._next(fmean(losses), NUM_ERRORS * stdev(losses) / NUM_STEPS**0.5, waited)
        if bound == self.bound:
            return replace(self, window=window), ""
        found = f"the effective sample size of the last {NUM_STEPS} steps was {mean:.3f}"
        reason = f"{found}, below {self.limits.ess:g}"
        if bound > self.bound:
            reason = f"{found}, and the learner waited for groups {waited:.0%} of the time"
        change = f"from {self.bound} to {bound}: {reason}"
        return Steering(self.limits, bound, self.bound + 1), change

    def _next(self, lost: float, error: float, waited: float) -> int:
        """The bound after steps that lost this share of their sample size, give or take `error`."""
        updates, allowed = self.bound + 1, 1 - self.limits.ess
        if lost - error > allowed:
            lowered = min(self.bound, int(updates * allowed / lost)) - 1
            return max(self.limits.min, lowered)
        would_lose = (lost + error) * ((updates + 1) / updates) ** 2
        is_higher = waited >= MIN_WAIT_FRAC and would_lose <= allowed
        return min(self.bound + is_higher, self.limits.max)
