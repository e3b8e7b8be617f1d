"""`parity`: how far engine and learner may disagree."""

from typing import Annotated

from pydantic import Field

from streamrl.config.section import Positive, Section


class ParitySettings(Section):
    """How far engine and learner may disagree on the same tokens, before anything is trained."""

    max_mean_gap: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |log-probability of the learner - of the engine|, in nats, with which `streamrl
    launch` starts; null does not ask."""
    max_gap: Annotated[float, Field(gt=0)] | None = None
    """The same for the worst single token."""
    num_prompts: Positive = 16
    """Prompts sampled for the comparison, one response each."""

    @property
    def is_required(self) -> bool:
        return self.max_mean_gap is not None or self.max_gap is not None
