"""The rewards of a run: those that apply to a row score its group, and their weighted sum is the
reward of an episode.

Invariant: the value of each reward is recorded as `reward/NAME`, whatever its weight; an error
carries the name of the reward that failed. What the first reward that reads something in the
response has read is what was extracted from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.concurrency import together
from actors.rewards.functions import Scorer, Scores
from streamrl.errors import RewardError, RolloutError
from streamrl.interfaces import Episode, Score
from streamrl.samples.record import shortened_answer


@dataclass(frozen=True)
class WeightedReward:
    """One reward; `data_sources` are those of the rows that it scores, all if there is none."""

    label: str
    scorer: Scorer
    weight: float = 1.0
    data_sources: tuple[str, ...] = ()

    async def score(self, episodes: Sequence[Episode]) -> Scores:
        """
        Raises:
            RewardError: the group cannot be scored.
        """
        try:
            return await self.scorer.score(episodes)
        except RolloutError as error:
            raise RewardError(str(error), self.label) from error.__cause__


@dataclass(frozen=True)
class Rewards:
    """A `streamrl.interfaces.Reward`; `data_source_key` is the column of a row's data source."""

    rewards: tuple[WeightedReward, ...]
    data_source_key: str = "data_source"

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Waits for all rewards, which score at the same time.

        Raises:
            RewardError: one of them cannot score the group.
            RolloutError: none applies to the row, or to one of the episodes.
        """
        applying = self._applying(episodes[0])
        scored = await together(reward.score(episodes) for reward in applying)
        return [self._sum(applying, scores) for scores in zip(*scored, strict=True)]

    def _applying(self, episode: Episode) -> list[WeightedReward]:
        source = str(episode.prompt.row.get(self.data_source_key, ""))
        found = [r for r in self.rewards if not r.data_sources or source in r.data_sources]
        if not found:
            names = ", ".join(reward.label for reward in self.rewards)
            raise RolloutError(
                f"data.rewards: none of {names} has the {self.data_source_key} {source!r} of the "
                "row in its data_source"
            )
        return found

    def _sum(self, rewards: Sequence[WeightedReward], scores: Sequence[Score | None]) -> Score:
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
