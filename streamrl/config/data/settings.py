"""`data`: prompts, how they are rendered, and the reward of a response."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

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
    system_prompt: str | None = None
    """Put in front of prompts that are strings."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What happens to longer ones: refuse, cut that side, or drop the prompt (counted)."""
    shuffle: bool = True
    """Read files in a new seeded order each epoch."""
    reward: str = "exact_match"
    """exact_match, numeric_answer, regex, environment (the sum of what the environment gives for
    each turn), task (the scorer of reasoning_gym), or PATH.py:FUNCTION."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
