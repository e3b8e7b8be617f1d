"""`data.rewards`: what scores the responses, each with its weight, its rows and its limits."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamrl.config.numbers import NotNegative, Positive, Seconds
from streamrl.config.section import Section
from streamrl.user_code import is_user_code

# Metrics of all rewards together have these names.
_TAKEN = frozenset({"mean", "std", "min", "max", "groups_alike_frac"})


class RewardSettings(Section):
    """One of several rewards. A string is short for a record with `reward` alone."""

    reward: str
    """The name of a built-in reward, or PATH.py:NAME."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    """In metrics, as `reward/NAME`, and in errors. Empty: the built-in's name, or NAME of
    PATH.py:NAME."""
    weight: float = 1.0
    """Factor of this reward in the sum; 0 records it without training on it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    data_source: tuple[str, ...] = ()
    """Values of the column `data.data_source_key` of the rows that it scores; empty: all rows."""
    timeout_s: Seconds = 300.0
    """Time for one call. What takes longer costs its group."""
    max_concurrent: Positive | None = None
    """Calls at a time; the others wait. Null: 64, or the cores of the machine where
    `isolation` is `process`."""
    retries: NotNegative | None = None
    """Further tries of a call that fails. Null: 3 for a reward behind a URL, else 0."""
    isolation: Literal["thread", "process"] | None = None
    """Where a function that is not async runs. A process can be ended when it hangs and cannot harm
    the generator; rows and answers must then be plain data. Null: `process` for `math`, else
    `thread`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"reward": value} if isinstance(value, str) else value

    @property
    def label(self) -> str:
        """What it is called in metrics and errors."""
        derived = self.reward.rpartition(":")[2] if is_user_code(self.reward) else self.reward
        return self.name or derived


def check_labels(rewards: Sequence[RewardSettings]) -> None:
    """
    Raises:
        ValueError: two rewards have the same label, or one has that of another metric.
    """
    labels = [reward.label for reward in rewards]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise ValueError(f"rewards: two are called {label!r}; give one of them another name")
        if label in _TAKEN:
            raise ValueError(f"rewards: reward/{label} is another metric; choose another name")
