"""The environments of a run with every default filled in: those of `environments`, or the one that
`generator` names.

Invariant: a run has at least one entry, and no two of them have one name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails

from streamrl.config.data import DataSettings
from streamrl.config.section import Positive, Section
from streamrl.errors import did_you_mean


class EnvironmentSettings(Section):
    """One of several environments, mixed by weight, instead of the one of `generator`."""

    name: Annotated[str, Field(min_length=1)]
    """Its tag in metrics, samples and reward normalization."""
    environment: str
    """As `generator.environment`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other entries."""
    group_size: Positive | None = None
    """Episodes per prompt; null: `generator.group_size`."""
    max_trajectories: Positive | None = None
    """Most episodes of it among `learner.groups_per_step` consecutive prompts; the other entries
    play the rest."""
    reward: str | None = None
    """Null: `data.reward`."""
    reward_kwargs: dict[str, Any] | None = None
    """Null: none, or `data.reward_kwargs` where reward is null, too."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Settings of its prompts other than those of `data`: source, source_kwargs, ..."""


if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

# The renderer and the evaluation are one for all entries, and the reward has settings of its own.
_OF_THE_RUN = (
    "chat_template",
    "tool_parser",
    "tool_schemas",
    "system_prompt",
    "max_prompt_length",
    "truncation",
    "num_eval_prompts",
    "changed",
    "first_prompt_index",
    "reward",
    "reward_kwargs",
)


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment of the run."""

    name: str
    environment: str
    kwargs: Mapping[str, Any]
    weight: float
    group_size: int
    max_trajectories: int | None
    data: DataSettings
    """Its prompts and its reward."""
    place: str = ""
    """Of its settings, such as "environments.0."; "" for the one that `generator` names."""

    @property
    def setting(self) -> str:
        """That names the environment."""
        return f"{self.place or 'generator.'}environment"

    @property
    def kwargs_setting(self) -> str:
        """That has its arguments."""
        return f"{self.place}kwargs" if self.place else "generator.environment_kwargs"

    @property
    def group_size_setting(self) -> str:
        return f"{self.place or 'generator.'}group_size"

    @property
    def max_groups(self) -> int | None:
        """Prompts that it plays at most among `learner.groups_per_step` consecutive ones."""
        return None if self.max_trajectories is None else self.max_trajectories // self.group_size


def entries_of(config: "RunConfig") -> tuple[EnvironmentEntry, ...]:
    """The entries in their order.

    Raises:
        ValidationError: `data` of an entry is refused.
    """
    generator = config.generator
    if not config.environments:
        alone = EnvironmentEntry(
            name=generator.environment,
            environment=generator.environment,
            kwargs=generator.environment_kwargs,
            weight=1.0,
            group_size=generator.group_size,
            max_trajectories=None,
            data=config.data,
        )
        return (alone,)
    return tuple(_entry(config, i, entry) for i, entry in enumerate(config.environments))


def _entry(config: "RunConfig", index: int, settings: EnvironmentSettings) -> EnvironmentEntry:
    return EnvironmentEntry(
        name=settings.name,
        environment=settings.environment,
        kwargs=settings.kwargs,
        weight=settings.weight,
        group_size=settings.group_size or config.generator.group_size,
        max_trajectories=settings.max_trajectories,
        data=_data(config.data, index, settings),
        place=f"environments.{index}.",
    )


def _data(data: DataSettings, index: int, settings: EnvironmentSettings) -> DataSettings:
    """The run's `data` with what the entry sets."""
    own = set(DataSettings.model_fields) - set(_OF_THE_RUN)
    if unknown := [key for key in settings.data if key not in own]:
        raise _refusals(
            [
                InitErrorDetails(
                    type="value_error",
                    loc=("environments", index, "data", key),
                    input=settings.data[key],
                    ctx={"error": ValueError(_why_not(key, own))},
                )
                for key in unknown
            ]
        )
    changed = {**_inherited(data, settings), **settings.data, **_reward(settings)}
    try:
        return DataSettings.model_validate(changed)
    except ValidationError as error:
        raise _refusals(
            [
                InitErrorDetails(
                    type=detail["type"],
                    loc=("environments", index, "data", *detail["loc"]),
                    input=detail["input"],
                    ctx=detail.get("ctx", {}),
                )
                for detail in error.errors()
            ]
        ) from error


def _inherited(data: DataSettings, settings: EnvironmentSettings) -> dict[str, Any]:
    """What is set of `data`, without the rewards if the entry has rewards of its own."""
    values = data.model_dump(exclude_unset=True)
    if settings.reward is None and "rewards" not in settings.data:
        return values
    return {k: v for k, v in values.items() if k not in ("reward", "reward_kwargs", "rewards")}


def _reward(settings: EnvironmentSettings) -> dict[str, Any]:
    if settings.reward is None:
        return {} if settings.reward_kwargs is None else {"reward_kwargs": settings.reward_kwargs}
    return {"reward": settings.reward, "reward_kwargs": settings.reward_kwargs or {}}


def _why_not(key: str, own: set[str]) -> str:
    if key in ("reward", "reward_kwargs"):
        return f"stands beside data, as {key} of the entry"
    if key in _OF_THE_RUN:
        return f"is one for the whole run: set data.{key}"
    return f"unknown key; {did_you_mean(key, own)}"


def _refusals(details: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("RunConfig", details)
