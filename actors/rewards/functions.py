"""A function as a reward: called off the event loop within its limits, its answer checked.

Invariant: a function that fails or answers nonsense costs its group (RolloutError, counted as
`failed`), never the daemon.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from actors.rewards.forms import BoundFunction
from actors.rewards.isolated import Processes
from actors.rewards.limits import CallLimits, together
from actors.rewards.output import OutputLimit
from actors.rewards.threads import Threads
from streamrl.interfaces import Episode, Score

Scores = Sequence[Score | None]
SUPPRESSED = "suppressed_bytes"
"""Metric of what a reward printed beyond its limit, where there was any."""


class Scorer(Protocol):
    """What scores the siblings of one prompt: one of a run's rewards."""

    async def score(self, episodes: Sequence[Episode]) -> Scores:
        """One for each episode; None where the reward does not apply.

        Raises:
            RolloutError: the group cannot be scored.
        """
        ...


class FunctionReward:
    """A function of one of the forms of `actors.rewards.forms`, async or not.

    Args:
        processes: where it runs, instead of threads.
    """

    def __init__(
        self,
        bound: BoundFunction,
        limits: CallLimits | None = None,
        output: OutputLimit | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._bound = bound
        self._limits = limits or CallLimits(bound.title)
        self._output = output or OutputLimit(bound.title)
        self._processes = processes
        self._threads = Threads(bound.title)

    async def score(self, episodes: Sequence[Episode]) -> Scores:
        """Waits for the calls: one for the group, or one for each episode at the same time."""
        takes_group = self._bound.form.takes_group
        groups = [episodes] if takes_group else [[episode] for episode in episodes]
        try:
            each = await together(self._limits.call(self._caller(group)) for group in groups)
        finally:
            num_suppressed = self._output.take_suppressed()
        scores = [score for scores in each for score in scores]
        return [_with_suppressed(score, num_suppressed / len(scores)) for score in scores]

    def _caller(self, episodes: Sequence[Episode]) -> Callable[[], Awaitable[Scores]]:
        if self._processes is not None:
            processes = self._processes
            return lambda: processes.run(episodes)
        if self._bound.is_async:
            return lambda: self._await(episodes)
        return lambda: self._threads.run(lambda: self._call(episodes))

    async def _await(self, episodes: Sequence[Episode]) -> Scores:
        with self._output.applied():
            return await self._bound.wait_for_score(episodes)

    def _call(self, episodes: Sequence[Episode]) -> Scores:
        """In a thread."""
        with self._output.applied():
            return self._bound.score(episodes)


def _with_suppressed(score: Score | None, num_bytes: float) -> Score | None:
    if score is None or not num_bytes:
        return score
    return Score(score.reward, {**score.metrics, SUPPRESSED: num_bytes})
