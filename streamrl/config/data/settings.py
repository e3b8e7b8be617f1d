"""`data`: prompts, how they are rendered, and the reward of a response."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config.data.rewards import RewardSettings, check_labels
from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class DataSettings(Section):
    """Prompts, how they are rendered, and what scores the responses."""

    source: str
    """A .jsonl, .json or .parquet file, the name of a procedural task (addition, reverse, copy,
    sort), reasoning_gym:NAME, or PATH.py:NAME."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a procedural task, of reasoning_gym or of PATH.py:NAME."""
    eval_source: str | None = None
    """Held-out prompts; a procedural task without one holds out prompts of its own."""
    num_eval_prompts: Positive = 256
    """Held-out prompts an evaluation uses."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the reference answer."""
    image_key: str | None = None
    """Column of a file with the images of a row, a list: paths relative to the file, base64 data:
    URLs, or {bytes, path} as parquet files of `datasets` have them. Each <image> in a prompt's text
    is the place of one; without, they stand before it."""
    video_key: str | None = None
    """The same for videos, each the list of its frames; <video> is the place of one."""
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
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What happens to longer ones: refuse, cut that side, or drop the prompt (counted)."""
    shuffle: bool = True
    """Read files in a new seeded order each epoch."""
    reward: str = "exact_match"
    """The name of a built-in reward, or PATH.py:NAME."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several rewards, whose weighted sum is the reward of an episode; instead of `reward`."""
    data_source_key: str = "data_source"
    """Column that says which of the `rewards` score a row."""

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
