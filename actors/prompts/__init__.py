"""The prompt stream: files, procedural tasks, reasoning-gym, a user's own.

A new source is a class with `__getitem__(prompt_index) -> Prompt` and a branch in `_open`.
"""

from collections.abc import Sized
from pathlib import Path

from actors.prompts.files import FilePrompts
from actors.prompts.tasks import TASKS, TaskPrompts
from actors.prompts.user import UserPrompts
from streamrl.config.data import DataSettings
from streamrl.data_files import SUFFIXES
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import PromptSource
from streamrl.user_code import is_user_code

HELD_OUT_SEED = 0


def open_prompts(data: DataSettings, seed: int) -> PromptSource:
    """The training stream that `data.source` names."""
    return _open(data, "data.source", data.source, seed, held_out=False)


def open_held_out(data: DataSettings) -> PromptSource:
    """Held-out prompts, numbered from 0 to `num_held_out` - 1: the same ones whatever `run.seed`
    is, and a file's from its first row on.

    Raises:
        ConfigError: `data.source` is a file or a user's own, and no `data.eval_source` was given.
    """
    source = data.eval_source or data.source
    knows_no_held_out = Path(source).suffix in SUFFIXES or is_user_code(source)
    if data.eval_source is None and knows_no_held_out:
        raise ConfigError(f"data.eval_source: is needed to evaluate; data.source is {source}")
    if data.eval_source is None:
        return _open(data, "data.source", source, HELD_OUT_SEED, held_out=True)
    in_order = data.model_copy(update={"shuffle": False})
    return _open(in_order, "data.eval_source", source, HELD_OUT_SEED, held_out=False)


def num_held_out(data: DataSettings, prompts: PromptSource) -> int:
    """`data.num_eval_prompts`, or fewer where a source has an end before that."""
    size = len(prompts) if isinstance(prompts, Sized) else data.num_eval_prompts
    return min(size, data.num_eval_prompts)


def _open(
    data: DataSettings, field: str, source: str, seed: int, *, held_out: bool
) -> PromptSource:
    if Path(source).suffix in SUFFIXES:
        return FilePrompts(
            field,
            Path(source),
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            media_keys={
                kind: key
                for kind, key in (("image", data.image_key), ("video", data.video_key))
                if key is not None
            },
            system_prompt=data.system_prompt,
            seed=seed if data.shuffle else None,
        )
    if is_user_code(source):
        return UserPrompts(field, source, data.source_kwargs, seed)
    kind, _, name = source.partition(":")
    if kind == "reasoning_gym":
        from actors.prompts.reasoning import ReasoningGymPrompts

        return ReasoningGymPrompts(name, data.source_kwargs, seed, held_out=held_out)
    if source not in TASKS:
        suffixes = ", ".join(SUFFIXES)
        raise ConfigError(
            f"{field}: was {source!r}; a file ({suffixes}), reasoning_gym:NAME, PATH.py:NAME "
            f"or a task: "
            f"{did_you_mean(source, TASKS)}"
        )
    return TaskPrompts(
        source, data.source_kwargs, seed, num_held_out=data.num_eval_prompts, held_out=held_out
    )
