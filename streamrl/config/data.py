"""`data`: prompts, how they are rendered, and how responses are rewarded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from streamrl.config.section import NotNegative, Positive, Probability, Seconds, Section, twice
from streamrl.user_code import is_user_code


class CurriculumSettings(Section):
    """Order of the rows within an epoch by a column."""

    column: str = "difficulty"
    """Numeric column; a dot reaches into a record."""
    order: Literal["ascending", "descending"] = "ascending"
    """Small or large numbers first."""
    window: Probability = 0.1
    """How far chance may move a row, as a fraction of all rows; 0: strict order."""
    num_epochs: Positive = 1
    """Number of epochs in this order; later ones follow `data.shuffle`."""


# Metrics of all rewards together have these names.
_TAKEN = frozenset({"mean", "std", "min", "max", "groups_alike_frac"})


class RewardSettings(Section):
    """One of several rewards; a plain string sets `reward`."""

    short_for = "reward"

    reward: str
    """A built-in reward, or PATH.py:NAME."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    """Name in metrics (`reward/NAME`) and errors; empty: the name of the reward."""
    weight: float = 1.0
    """Weight in the sum; 0: recorded but not trained."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    data_source: tuple[str, ...] = ()
    """Values of `data.data_source_key` whose rows it scores; empty: all rows."""
    timeout_s: Seconds = 300.0
    """Seconds that one call may take; then the group fails."""
    max_concurrent: Positive | None = None
    """Most calls at a time. Null: 64, or the number of cores for calls in processes."""
    retries: NotNegative | None = None
    """Retries of a failed call. Null: 3 for a reward behind a URL, otherwise 0."""
    isolation: Literal["thread", "process"] | None = None
    """Where a function that is not async runs; a hanging process can be killed. Null: process for
    `math`, otherwise thread."""

    @property
    def label(self) -> str:
        """The name in metrics and errors."""
        derived = self.reward.rpartition(":")[2] if is_user_code(self.reward) else self.reward
        return self.name or derived


class MessageTemplate(Section):
    """One chat message of a prompt."""

    role: str
    """The message's role, such as system or user."""
    content: str
    """Jinja template of the text, with the row's columns."""


def _form(value: Any) -> str:
    return "List" if isinstance(value, list | tuple) else "Text"


PromptTemplate = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[MessageTemplate, ...], Tag("List")],
    Discriminator(_form),
]


_WEIGHT = Annotated[float, Field(gt=0, le=1e6)]


class SourceSettings(Section):
    """One of several prompt sources; a plain string sets `path`."""

    short_for = "path"

    path: str
    """The source, as in `data.source`."""
    weight: _WEIGHT | None = None
    """Share of the prompts; if no source has a weight, their rows are read like one file."""
    name: str = ""
    """Value for the column `data.data_source_key`; empty: the row's own value, otherwise the file
    name."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set, or of a folder with several."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments, as in `data.source_kwargs`."""
    prompt_key: str | None = None
    """Null: as in `data`."""
    answer_key: str | None = None
    """Null: as in `data`."""
    prompt_template: PromptTemplate | None = None
    """Null: as in `data`."""


def _as_list(value: Any) -> Any:
    """Treat a single record as a list of one."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("is an empty list; name at least one source")
    return [value] if isinstance(value, dict) else value


Sources = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[SourceSettings, ...], Tag("List")],
    Discriminator(_form),
    BeforeValidator(_as_list),
]


class DataSettings(Section):
    """Prompts, how they are rendered, and how responses are rewarded."""

    source: Sources
    """A file, pattern or folder, datasets:NAME of the hub, a task, reasoning_gym:NAME,
    PATH.py:NAME, or `environment` (docs/data.md); or a list of these or of records."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a task, of reasoning_gym or of PATH.py:NAME."""
    eval_source: Sources | None = None
    """Source of held-out prompts, likewise; a task has its own held-out prompts."""
    num_eval_prompts: Positive = 256
    """Number of held-out prompts per source in an evaluation."""
    prompt_key: str = "prompt"
    """Column with the prompt, text or chat messages; a dot reaches into a record or list."""
    prompt_template: PromptTemplate | None = None
    """Jinja template that makes the prompt from the row's columns: text or messages."""
    answer_key: str | None = "answer"
    """Column with the reference answer, such as reward_model.ground_truth; null: none."""
    image_key: str | None = None
    """Column with the row's image or images (docs/vision.md); each <image> in the prompt stands for
    one."""
    video_key: str | None = None
    """Column with the row's videos, each a list of images, for each <video> in the prompt."""
    chat_template: Literal["native", "none"] | Path = "native"
    """The tokenizer's (native), none (the prompt as it is), or a Jinja file."""
    tool_parser: str = "auto"
    """Format of tool calls in completions: a name (docs/tools.md), or a response template in
    PATH.json; auto: the one that matches the chat template."""
    tool_schemas: Literal["template", "system_message", "omit"] = "template"
    """Where the policy reads of its tools: in the chat template's form, as JSON in the system
    message, or nowhere."""
    system_prompt: str | None = None
    """System message before prompts that are plain text."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop", "filter"] = "error"
    """What to do with longer prompts: refuse, cut the left or right side, drop when their turn
    comes, or filter at the start."""
    filter_workers: Positive = 1
    """Number of processes that filter."""
    shuffle: bool = True
    """Whether files are read in a new random order each epoch, by `run.seed`."""
    changed: Literal["refuse", "allow"] = "refuse"
    """If the rows have changed at `--resume`: refuse, or begin an epoch with them."""
    first_prompt_index: NotNegative = 0
    """Index of the first row; set by a launch whose rows have changed."""
    curriculum: CurriculumSettings | None = None
    """Order of the rows, such as easy ones first; null: none."""
    reward: str = "exact_match"
    """A built-in reward, or PATH.py:NAME."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several rewards, whose weighted sum is used instead of `reward`."""
    data_source_key: str = "data_source"
    """Column that decides which of the `rewards` score a row."""

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
