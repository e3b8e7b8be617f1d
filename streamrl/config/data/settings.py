"""`data`: prompts, how they are rendered, and the reward of a response."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config.data.curriculum import CurriculumSettings
from streamrl.config.data.rewards import RewardSettings, check_labels
from streamrl.config.data.source import Sources, SourceSettings
from streamrl.config.data.template import PromptTemplate
from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class DataSettings(Section):
    """Prompts, how they are rendered, and what scores the responses."""

    source: Sources
    """A file (.jsonl, .jsonl.gz, .jsonl.zst, .json, .csv, .parquet) or a pattern of files such as
    train/*.parquet, a folder that the library datasets has saved, datasets:NAME of the Hugging Face
    hub, the name of a procedural task (addition, reverse, copy, sort), reasoning_gym:NAME,
    PATH.py:NAME, or `environment`: it makes up its own levels. Or a list of these, or records."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a procedural task, of reasoning_gym or of PATH.py:NAME."""
    eval_source: Sources | None = None
    """Held-out prompts, in the same forms; a procedural task without one holds out prompts of its
    own."""
    num_eval_prompts: Positive = 256
    """Held-out prompts an evaluation uses of each source, from its first row on."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages. A dot reaches into a record."""
    prompt_template: PromptTemplate | None = None
    """Jinja that makes the prompt from the columns of a row, instead of `prompt_key`: a text, or a
    list of messages with a role and a content each."""
    answer_key: str | None = "answer"
    """Column of the reference answer, such as reward_model.ground_truth; null for none."""
    chat_template: Literal["native", "none"] | Path = "native"
    """`native` uses the tokenizer's template, if it has one; `none` feeds the prompt as it stands;
    a path names a Jinja file."""
    tool_parser: str = "auto"
    """How a completion writes its tool calls: hermes, qwen3_coder, llama3 or mistral, or a file
    PATH.json with a response template of transformers; `auto` takes the tokenizer's own, or the one
    of these that the chat template is written for."""
    system_prompt: str | None = None
    """Put in front of prompts that are strings."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop", "filter"] = "error"
    """What happens to longer ones: refuse, cut that side, drop the prompt when its turn comes
    (counted), or filter the rows of files before the first prompt is sampled."""
    filter_workers: Positive = 1
    """Processes that filter the rows; the result is kept in the run's folder."""
    shuffle: bool = True
    """Read files in a new seeded order each epoch."""
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
