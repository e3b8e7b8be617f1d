"""Which samples a person asks for."""

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from streamrl.samples.record import Sample

Order: TypeAlias = Literal["newest", "best", "worst"]


@dataclass(frozen=True)
class Choice:
    """A sample is chosen if it meets all that is given; both ends of a range belong to it.

    `order` says which come first: `newest`, or the `best` or `worst` by reward.
    """

    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    environment: str | None = None
    data_source: str | None = None
    pattern: "re.Pattern[str] | None" = None
    order: Order = "newest"
    limit: int = 20

    def of(self, samples: Iterable[Sample]) -> list[Sample]:
        """At most `limit` of these, which come newest first; no more than that are in memory."""
        matching = (sample for sample in samples if self._matches(sample))
        match self.order:
            case "newest":
                return list(islice(matching, self.limit))
            case "best":
                return heapq.nlargest(self.limit, matching, key=lambda s: s.reward)
            case "worst":
                return heapq.nsmallest(self.limit, matching, key=lambda s: s.reward)

    def _matches(self, sample: Sample) -> bool:
        return all(self._conditions(sample))

    def _conditions(self, s: Sample) -> Iterator[bool]:
        yield self.first_step is None or s.step >= self.first_step
        yield self.last_step is None or s.step <= self.last_step
        yield self.min_reward is None or s.reward >= self.min_reward
        yield self.max_reward is None or s.reward <= self.max_reward
        yield self.environment is None or s.environment == self.environment
        yield self.data_source is None or s.data_source == self.data_source
        yield self.pattern is None or any(
            self.pattern.search(text) for text in (s.prompt, *(m.content for m in s.messages))
        )
