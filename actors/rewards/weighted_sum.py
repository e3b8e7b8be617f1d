"""The rewards of a run, whose weighted sum is the reward of an episode.

`FunctionReward`: a function as a reward, called off the event loop within limits; its answer is
checked. Invariant: a function that fails or answers nonsense fails its group (RolloutError, counted
as `failed`), never the daemon.

`Rewards`: all rewards of a run. Those that apply to a row score its group. Invariant: the value of
each reward is recorded as `reward/NAME`, whatever its weight; an error names the reward that
failed. An episode's `extracted` comes from the first reward that extracts an answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from actors.concurrency import Threads, together
from actors.rewards.calls.isolated import Processes, WorkerSetup
from actors.rewards.calls.limits import OutputLimit, RewardLimits
from actors.rewards.forms import BoundFunction
from streamrl.errors import RewardError, RolloutError
from streamrl.interfaces import Episode, Score
from streamrl.samples.record import shortened_answer

Scores = Sequence[Score | None]
AtOnce = Callable[[Episode], float | Score | None]
SUPPRESSED = "suppressed_bytes"
"""Metric of the bytes that a reward printed beyond its limit, if any."""


class FunctionReward:
    """A function of one of the forms of `actors.rewards.forms`, async or not.

    Args:
        setup: if given, the function runs in processes made from it instead of threads.
        at_once: a function that takes microseconds and returns the same result, or None if it
            cannot tell. It is called on the event loop, since a call elsewhere takes longer.
        label: the name under which its values are recorded.
        data_sources: the data sources of the rows that it scores; () for all rows.
    """

    def __init__(
        self,
        bound: BoundFunction,
        limits: RewardLimits | None = None,
        setup: WorkerSetup | None = None,
        at_once: AtOnce | None = None,
        *,
        label: str = "",
        weight: float = 1.0,
        data_sources: tuple[str, ...] = (),
    ) -> None:
        self.label, self.weight, self.data_sources = label, weight, data_sources
        self._bound = bound
        self._at_once = at_once
        self._limits = limits or RewardLimits(bound.title)
        self._output = OutputLimit(bound.title)
        self._processes = None if setup is None else Processes(setup, self._output)
        self._threads = Threads(bound.title, "; with isolation: process they would be")

    async def score(self, episodes: Sequence[Episode]) -> Scores:
        """Return one score for each episode; None if the reward does not apply. Waits for the calls
        of episodes that are not scored at once: one for the group, or one for each, all at the same
        time.

        Raises:
            RewardError: the group cannot be scored.
        """
        try:
            known = [self._known_at_once(episode) for episode in episodes]
            rest = [e for e, value in zip(episodes, known, strict=True) if value is None]
            called = iter(await self._by_calls(rest) if rest else ())
        except RolloutError as error:
            raise RewardError(str(error), self.label) from error.__cause__
        return [next(called) if value is None else Score.of(value) for value in known]

    def _known_at_once(self, episode: Episode) -> float | Score | None:
        if self._at_once is None:
            return None
        try:
            return self._at_once(episode)
        except RolloutError:
            raise
        except Exception:  # The call scores it, or fails its group alone.
            return None

    async def _by_calls(self, episodes: Sequence[Episode]) -> Scores:
        takes_group = self._bound.form.takes_group
        groups = [episodes] if takes_group else [[episode] for episode in episodes]
        prepare = self._processes.prepare if self._processes else None
        try:
            each = await together(
                self._limits.call(partial(self._score, group), prepare) for group in groups
            )
        finally:
            num_suppressed = self._output.take_suppressed()
        scores = [score for scores in each for score in scores]
        return [_with_suppressed(score, num_suppressed / len(scores)) for score in scores]

    async def _score(self, episodes: Sequence[Episode]) -> Scores:
        """Call the function once. Waits for the call."""
        if self._processes is not None:
            return await self._processes.run(episodes)
        if not self._bound.is_async:
            return await self._threads.run(partial(self._call, episodes))
        with self._output.applied():
            return await self._bound.wait_for_score(episodes)

    def _call(self, episodes: Sequence[Episode]) -> Scores:
        """Call the function. Runs in a thread."""
        with self._output.applied():
            try:
                return self._bound.score(episodes)
            except RolloutError as error:
                if "signal only works in main thread" not in str(error):
                    raise
                raise RolloutError(
                    f"{error}; what sets signals, as time limits do, needs isolation: process"
                ) from error.__cause__


def _with_suppressed(score: Score | None, num_bytes: float) -> Score | None:
    if score is None or not num_bytes:
        return score
    return replace(score, metrics={**score.metrics, SUPPRESSED: num_bytes})


@dataclass(frozen=True)
class Rewards:
    """A `streamrl.interfaces.Reward`; `data_source_key` is the column of a row's data source."""

    rewards: tuple[FunctionReward, ...]
    data_source_key: str = "data_source"

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Score a group. Waits for all rewards, which score at the same time.

        Raises:
            RewardError: one of them cannot score the group.
            RolloutError: none applies to the row, or to one of the episodes.
        """
        applying = self._applying(episodes[0])
        scored = await together(reward.score(episodes) for reward in applying)
        return [self._sum(applying, scores) for scores in zip(*scored, strict=True)]

    def _applying(self, episode: Episode) -> list[FunctionReward]:
        source = str(episode.prompt.row.get(self.data_source_key, ""))
        found = [r for r in self.rewards if not r.data_sources or source in r.data_sources]
        if not found:
            names = ", ".join(reward.label for reward in self.rewards)
            raise RolloutError(
                f"data.rewards: none of {names} has the {self.data_source_key} {source!r} of the "
                "row in its data_source"
            )
        return found

    def _sum(self, rewards: Sequence[FunctionReward], scores: Sequence[Score | None]) -> Score:
        known = [(r, s) for r, s in zip(rewards, scores, strict=True) if s is not None]
        if not known:
            names = " and ".join(reward.label for reward in rewards)
            raise RewardError(
                f"reward {names} applies to no episode of the row: it returned None for one; a "
                "reward of the run must return a number",
                rewards[0].label,
            )
        metrics = {f"reward/{r.label}": s.reward for r, s in known}
        further = {
            f"reward/{r.label}/{name}": value for r, s in known for name, value in s.metrics.items()
        }
        extracted = next((s.extracted for _, s in known if s.extracted is not None), None)
        total = sum(r.weight * s.reward for r, s in known)
        if not math.isfinite(total):
            terms = " + ".join(f"{r.weight:g} * {s.reward:g} of {r.label}" for r, s in known)
            raise RewardError(
                f"the reward {terms} is {total:g}; it must be finite", known[0][0].label
            )
        return Score(total, {**metrics, **further}, extracted and shortened_answer(extracted))
