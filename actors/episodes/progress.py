"""A group while it is sampled, as its generator reads it: tokens, and slots that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.episodes.episode import EpisodeRun


def _nobody() -> None:
    """Is told that a slot is free."""


@dataclass(eq=False)
class GroupProgress:
    """The episodes of a group that is being sampled; none before it begins."""

    episodes: Sequence[EpisodeRun] = ()
    on_slot_free: Callable[[], None] = _nobody
    """Called when an episode begins to wait for its environment, or ends."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the longest sibling has sampled so far, as far as the engine has reported
        them; -1 if it has reported none."""
        return max((episode.num_tokens for episode in self.episodes), default=-1)

    @property
    def num_slots(self) -> int:
        """Slots of the engine that its episodes have, or wait for."""
        return sum([episode.num_slots for episode in self.episodes])

    @property
    def num_running(self) -> int:
        return sum(not episode.is_over for episode in self.episodes)
