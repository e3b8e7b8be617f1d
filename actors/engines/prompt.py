"""Checks of a prompt that all engines share, and the end-of-sequence tokens of a model."""

from collections.abc import Sequence

from streamrl.errors import RolloutError


def room_for(prompt_token_ids: Sequence[int], max_model_len: int) -> int:
    """The longest completion of this prompt, in tokens, at least one.

    Raises:
        RolloutError: the prompt is empty, or fills the context.
    """
    room = max_model_len - len(prompt_token_ids)
    if not 0 < room < max_model_len:
        raise RolloutError(
            f"a prompt of {len(prompt_token_ids)} tokens leaves no room for a completion: "
            f"generator.max_model_len is {max_model_len}"
        )
    return room


def require_known_tokens(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary, which would be read outside the embedding's memory."""
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= vocab_size:
        raise RolloutError(
            f"a prompt has token ids from {lowest} to {highest}; "
            f"the model's vocabulary has {vocab_size}"
        )


def eos_set(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """The end-of-sequence tokens, in each form that a model's folder may have."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
