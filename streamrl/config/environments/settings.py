"""`environments`: what plays the prompts of a run that has several environments."""

from typing import Annotated, Any

from pydantic import Field

from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class EnvironmentSettings(Section):
    """One environment of several, its share of the prompts and its reward."""

    name: Annotated[str, Field(min_length=1)]
    """Its tag in metrics, samples and reward normalization; no two entries share one."""
    environment: str
    """As generator.environment: a built-in one, or PATH.py:CLASS."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts that it plays, relative to the other entries."""
    group_size: Positive | None = None
    """Episodes per prompt; unset: generator.group_size."""
    max_trajectories: Positive | None = None
    """Most episodes of it among learner.groups_per_step consecutive prompts; the other entries play
    the rest. Unset: no limit."""
    reward: str | None = None
    """Its reward; unset: data.reward."""
    reward_kwargs: dict[str, Any] | None = None
    """Arguments of its reward; unset: none, or data.reward_kwargs where reward is unset, too."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Settings of its prompts that differ from those of `data`: source, source_kwargs, ..."""
