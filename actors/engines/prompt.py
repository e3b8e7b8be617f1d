"""What every engine does alike: it refuses a bad prompt alone, and knows what ends a sequence."""

from collections.abc import Sequence

from streamrl.errors import RolloutError


def room_for(prompt_token_ids: Sequence[int], max_model_len: int) -> int:
    """Tokens a completion of this prompt may have, at least one."""
    room = max_model_len - len(prompt_token_ids)
    if not 0 < room < max_model_len:
        raise RolloutError(
            f"a prompt of {len(prompt_token_ids)} tokens leaves no room for a completion: "
            f"generator.max_model_len is {max_model_len}"
        )
    return room


def require_known_tokens(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    """Ids beyond the vocabulary would read memory that is not the embedding's."""
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= vocab_size:
        raise RolloutError(
            f"a prompt has token ids from {lowest} to {highest}; "
            f"the model's vocabulary has {vocab_size}"
        )


def eos_set(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """The end-of-sequence tokens, from the forms in which a model's folder names them."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
