"""`data`: prompts, how they are rendered, and the reward of a response."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from streamrl.config.section import NotNegative, Positive, Probability, Seconds, Section, twice
from streamrl.user_code import is_user_code


class CurriculumSettings(Section):
    """Rows within an epoch are ordered by a column."""

    column: str = "difficulty"
    """Column of a number; a dot reaches into a record."""
    order: Literal["ascending", "descending"] = "ascending"
    """Small numbers first, or large ones."""
    window: Probability = 0.1
    """How far chance moves a row, in parts of all; 0 sorts strictly."""
    num_epochs: Positive = 1
    """Epochs in this order; later ones follow `data.shuffle`."""


# Metrics of all rewards together have these names.
_TAKEN = frozenset({"mean", "std", "min", "max", "groups_alike_frac"})


class RewardSettings(Section):
    """One of several rewards; a string is its `reward` alone."""

    short_for = "reward"

    reward: str
    """A built-in one, or PATH.py:NAME."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    """In metrics, as `reward/NAME`, and errors; empty: that of the reward."""
    weight: float = 1.0
    """Factor in the sum; 0 records it without training on it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    data_source: tuple[str, ...] = ()
    """Values of `data.data_source_key` whose rows it scores; empty: all."""
    timeout_s: Seconds = 300.0
    """Of one call; beyond it the group fails."""
    max_concurrent: Positive | None = None
    """Calls at a time. Null: 64, or the machine's cores in processes."""
    retries: NotNegative | None = None
    """Further tries of a failed call. Null: 3 behind a URL, else 0."""
    isolation: Literal["thread", "process"] | None = None
    """Where a function that is not async runs; a process can be ended when it hangs. Null:
    `process` for `math`, else `thread`."""

    @property
    def label(self) -> str:
        """What it is called in metrics and errors."""
        derived = self.reward.rpartition(":")[2] if is_user_code(self.reward) else self.reward
        return self.name or derived


class MessageTemplate(Section):
    """One chat message of a prompt."""

    role: str
    """Such as system or user."""
    content: str
    """Jinja, with the row's columns."""


def _form(value: Any) -> str:
    return "List" if isinstance(value, list | tuple) else "Text"


PromptTemplate = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[MessageTemplate, ...], Tag("List")],
    Discriminator(_form),
]


_WEIGHT = Annotated[float, Field(gt=0, le=1e6)]


class SourceSettings(Section):
    """One of several sources of prompts; a string is its `path` alone."""

    short_for = "path"

    path: str
    """What `data.source` names as text."""
    weight: _WEIGHT | None = None
    """Share of the prompts; if none has one, the rows of all are one file."""
    name: str = ""
    """Put into column `data.data_source_key`; empty: what stands there, else the file's name."""
    subset: str | None = None
    """Configuration of a data set of the hub."""
    split: str | None = None
    """Of a data set of the hub, or a folder with several."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """As `data.source_kwargs`."""
    prompt_key: str | None = None
    """Null: that of `data`."""
    answer_key: str | None = None
    """Null: that of `data`."""
    prompt_template: PromptTemplate | None = None
    """Null: that of `data`."""


def _as_list(value: Any) -> Any:
    """One record is a list of one."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("is an empty list; name at least one source")
    return [value] if isinstance(value, dict) else value


Sources = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[SourceSettings, ...], Tag("List")],
    Discriminator(_form),
    BeforeValidator(_as_list),
]


class DataSettings(Section):
    """Prompts, how they are rendered, and what scores the responses."""

    source: Sources
    """A file, a pattern or a folder, datasets:NAME of the hub, a task, reasoning_gym:NAME,
    PATH.py:NAME, or `environment` (docs/data.md); or a list of these or of records."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a task, of reasoning_gym or of PATH.py:NAME."""
    eval_source: Sources | None = None
    """Held-out prompts, likewise; a task without one holds out prompts of its own."""
    num_eval_prompts: Positive = 256
    """Held-out prompts of each source that an evaluation uses."""
    prompt_key: str = "prompt"
    """Column of the prompt, text or chat messages; a dot reaches into a record or, with a number,
    into a list."""
    prompt_template: PromptTemplate | None = None
    """Jinja that makes the prompt of a row's columns: text, or messages."""
    answer_key: str | None = "answer"
    """Column of the reference answer, such as reward_model.ground_truth; null for none."""
    image_key: str | None = None
    """Column with a row's image, or the list of them (docs/vision.md); <image> in the prompt is the
    place of one."""
    video_key: str | None = None
    """Column with the row's videos, each a list of such images, at <video>."""
    chat_template: Literal["native", "none"] | Path = "native"
    """`native`: the tokenizer's; `none`: the prompt as it stands; or a Jinja file."""
    tool_parser: str = "auto"
    """How a completion writes tool calls: a name (docs/tools.md), or a response template in
    PATH.json; `auto`: what fits the chat template."""
    tool_schemas: Literal["template", "system_message", "omit"] = "template"
    """Where the policy reads which tools there are: in the chat template, in the system message, as
    JSON, or nowhere."""
    system_prompt: str | None = None
    """Before prompts that are text."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop", "filter"] = "error"
    """Longer prompts: refuse, cut that side, drop when their turn comes, or filter at the start."""
    filter_workers: Positive = 1
    """Processes that filter."""
    shuffle: bool = True
    """Whether files are read in a new seeded order each epoch."""
    changed: Literal["refuse", "allow"] = "refuse"
    """Where the rows have changed on `--resume`: refuse, or begin an epoch of them."""
    first_prompt_index: NotNegative = 0
    """Where the rows begin; set by a launch whose rows have changed."""
    curriculum: CurriculumSettings | None = None
    """Easy rows first; null for none."""
    reward: str = "exact_match"
    """A built-in reward, or PATH.py:NAME."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several, whose weighted sum is the reward; instead of `reward`."""
    data_source_key: str = "data_source"
    """Column that says which of the `rewards` score a row."""

    @property
    def sources(self) -> tuple[SourceSettings, ...]:
        """`source` as a list."""
        return self._listed(self.source)

    @property
    def eval_sources(self) -> tuple[SourceSettings, ...]:
        """`eval_source` as a list."""
        return () if self.eval_source is None else self._listed(self.eval_source)

    def _listed(self, sources: str | tuple[SourceSettings, ...]) -> tuple[SourceSettings, ...]:
        if isinstance(sources, str):
            return (SourceSettings(path=sources, kwargs=self.source_kwargs),)
        return sources

    @property
    def all_rewards(self) -> tuple[RewardSettings, ...]:
        """`rewards`, or `reward` as the only one."""
        return self.rewards or (RewardSettings(reward=self.reward, kwargs=self.reward_kwargs),)

    def contradictions(self) -> Iterator[str]:
        if self.source_kwargs and not isinstance(self.source, str):
            yield "source_kwargs: has no effect on a list; give its entries kwargs"
        if self.rewards and (self.not_default(["reward"]) or self.reward_kwargs):
            yield "reward: has no effect beside data.rewards; list it there"
        labels = [reward.label for reward in self.all_rewards]
        if label := twice(labels):
            yield f"two rewards are called {label!r}; give one of them another name"
        if taken := [label for label in labels if label in _TAKEN]:
            yield f"rewards: reward/{taken[0]} is another metric; choose another name"
