"""What a built-in reward compares a response with, of the row.

Invariant: a row without it fails its group; it scores neither 0, which trains on nothing, nor 1,
which pays for anything.
"""

from typing import Any

from actors.rewards.calls.limits import FinalError
from actors.rewards.forms import gold_of
from streamrl.interfaces import Prompt


def text_to_match(prompt: Prompt) -> str:
    """The answer of `exact_match`.

    Raises:
        FinalError: it is empty.
    """
    if not prompt.answer.strip():
        raise no_gold(prompt, prompt.answer, "exact_match needs one that is not empty")
    return prompt.answer


def expression_to_match(prompt: Prompt) -> str:
    """The answer of `math`.

    Raises:
        FinalError: there is none.
    """
    gold = gold_of(prompt)
    if gold is None or gold in ([], {}) or not str(gold).strip():
        raise no_gold(prompt, gold, "math needs an expression")
    return str(gold)


def no_gold(prompt: Prompt, answer: Any, needed: str) -> FinalError:
    """The sentence about a row that cannot be scored."""
    return FinalError(f"{prompt.origin or 'the row'}: the answer was {answer!r}; {needed}")
