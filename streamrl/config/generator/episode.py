"""`generator.episode`: the limits of an episode of several turns."""

from typing import Literal

from streamrl.config.numbers import Positive, Seconds
from streamrl.config.section import Section


class EpisodeSettings(Section):
    """Limits of an episode; `group_deadline_s` is the one of its time."""

    max_turns: Positive | None = None
    """Completions of an episode; one that goes on after them ends as truncated. Unset: no limit."""
    turn_deadline_s: Seconds | None = None
    """A turn that takes longer, in the engine and in the environment together, ends its episode as
    truncated, with the tokens that it has. Unset: `group_deadline_s`."""
    truncated: Literal["keep", "drop"] = "keep"
    """Siblings that a limit cut: keep them, and algorithm.reward.truncated says what the learner
    does; or leave them out of their group. A group with fewer than two others is then dropped, as
    filtered."""
    max_in_flight: Positive | None = None
    """Episodes of one generator at a time, those that wait for their environment included. Unset:
    as many as the engine has slots for, and what waits does not count."""
