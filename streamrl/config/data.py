"""`data`: prompts, how they are rendered, and the reward of a response."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from streamrl.config.section import NotNegative, Positive, Seconds, Section
from streamrl.user_code import is_user_code


class CurriculumSettings(Section):
    """The order of the rows within an epoch follows a column instead of chance alone."""

    column: str = "difficulty"
    """Column of a number; a dot reaches into a record."""
    order: Literal["ascending", "descending"] = "ascending"
    """Which rows come first: those with small numbers, or with large ones."""
    window: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How far chance moves a row, as a share of all rows; 0 sorts strictly."""
    num_epochs: Positive = 1
    """Epochs in this order; those that follow are shuffled as `data.shuffle` says."""


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
    """Where a function that is not async runs. A process can be ended when it hangs; rows must then
    be plain data. Null: `process` for `math`, else `thread`."""

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


class MessageTemplate(Section):
    """One chat message of a prompt."""

    role: str
    """Such as system or user."""
    content: str
    """Jinja, with the columns of the row."""


def _form(value: Any) -> str:
    return "List" if isinstance(value, list | tuple) else "Text"


PromptTemplate = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[MessageTemplate, ...], Tag("List")],
    Discriminator(_form),
]


_WEIGHT = Annotated[float, Field(gt=0, le=1e6)]


class SourceSettings(Section):
    """One of several sources of prompts. A string is short for a record with `path` alone."""

    path: str
    """What `data.source` names as a string."""
    weight: _WEIGHT | None = None
    """Share of the prompts. If none has a weight, the rows of all are one file; if some have, the
    others weigh 1."""
    name: str = ""
    """Put into the column `data.data_source_key` of each row. Empty: the column as it is, else the
    file's name."""
    subset: str | None = None
    """Configuration of a data set of the hub."""
    split: str | None = None
    """Split of a data set of the hub, or of a folder that has several."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """As `data.source_kwargs`, for this source."""
    prompt_key: str | None = None
    """As `data.prompt_key`, which null takes."""
    answer_key: str | None = None
    """As `data.answer_key`, which null takes."""
    prompt_template: PromptTemplate | None = None
    """As `data.prompt_template`, which null takes."""


def _as_list(value: Any) -> Any:
    """One record is a list of one; a text in a list is a record."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError("is an empty list; name at least one source")
    return [{"path": entry} if isinstance(entry, str) else entry for entry in value]


Sources = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[SourceSettings, ...], Tag("List")],
    Discriminator(_form),
    BeforeValidator(_as_list),
]


class DataSettings(Section):
    """Prompts, how they are rendered, and what scores the responses."""

    source: Sources
    """A file (.jsonl, .jsonl.gz, .jsonl.zst, .json, .csv, .parquet) or pattern of files, a folder
    of the library datasets, datasets:NAME of the hub, a procedural task (addition, reverse, copy,
    sort), reasoning_gym:NAME, PATH.py:NAME, or `environment`, which makes up levels. Or a list of
    these, or records."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a procedural task, of reasoning_gym or of PATH.py:NAME."""
    eval_source: Sources | None = None
    """Held-out prompts, in the same forms; a procedural task without one holds out prompts of its
    own."""
    num_eval_prompts: Positive = 256
    """Held-out prompts an evaluation uses of each source, from its first row on."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages. A dot reaches into a record, or
    with a number, from 0, into a list."""
    prompt_template: PromptTemplate | None = None
    """Jinja that makes the prompt from the columns of a row, instead of `prompt_key`: a text, or a
    list of messages."""
    answer_key: str | None = "answer"
    """Column of the reference answer, such as reward_model.ground_truth; null for none."""
    image_key: str | None = None
    """Column with the images of a row, a list: paths relative to the file, base64 data: URLs, or
    {bytes, path}. Each <image> in a prompt's text is the place of one; without, they stand before
    it."""
    video_key: str | None = None
    """The same for videos, each the list of its frames; <video> is the place of one."""
    chat_template: Literal["native", "none"] | Path = "native"
    """`native` uses the tokenizer's template, if it has one; `none` feeds the prompt as it stands;
    a path names a Jinja file."""
    tool_parser: str = "auto"
    """How a completion writes its tool calls: hermes, qwen3_coder, glm, llama3, mistral,
    mistral_v11, deepseek, kimi_k2, minimax_m2, gemma4, cohere, pythonic, gpt_oss, or PATH.json, a
    response template of transformers; `auto`: the tokenizer's own, or the one that reads what the
    chat template renders of a call."""
    tool_schemas: Literal["template", "system_message", "omit"] = "template"
    """Where the policy reads which tools there are: where the chat template describes them, and a
    run is refused whose template does not; in the system message, as JSON; or nowhere."""
    system_prompt: str | None = None
    """Put in front of prompts that are strings."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop", "filter"] = "error"
    """Longer ones: refuse, cut that side, drop when their turn comes (counted), or filter the rows
    of files before the first prompt is sampled."""
    filter_workers: Positive = 1
    """Processes that filter the rows; the result is kept in the run's folder."""
    shuffle: bool = True
    """Read files in a new seeded order each epoch."""
    changed: Literal["refuse", "allow"] = "refuse"
    """What `--resume` does where the rows are others than the run began with: refuse, or go on with
    a fresh epoch of them."""
    first_prompt_index: NotNegative = 0
    """Prompt of the run with which the first epoch of the rows begins; a launch sets it where rows
    have changed."""
    curriculum: CurriculumSettings | None = None
    """Easy rows first; null for none."""
    reward: str = "exact_match"
    """The name of a built-in reward, or PATH.py:NAME."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several rewards, whose weighted sum is the reward of an episode; instead of `reward`."""
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

    @model_validator(mode="after")
    def _has_arguments_for_one_source(self) -> "DataSettings":
        if self.source_kwargs and not isinstance(self.source, str):
            raise ValueError("source_kwargs: has no effect on a list; give its entries kwargs")
        return self

    @property
    def all_rewards(self) -> tuple[RewardSettings, ...]:
        """`rewards`, or `reward` as the only one."""
        return self.rewards or (RewardSettings(reward=self.reward, kwargs=self.reward_kwargs),)

    @model_validator(mode="after")
    def _names_its_rewards_once(self) -> "DataSettings":
        default = type(self).model_fields["reward"].default
        if self.rewards and (self.reward != default or self.reward_kwargs):
            raise ValueError("reward: has no effect beside data.rewards; list it there")
        check_labels(self.all_rewards)
        return self
