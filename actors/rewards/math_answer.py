"""The reward `math`: mathematical equality, by math-verify.

It runs in a process of its own: sympy may take hours over an expression that a model wrote, and
holds the interpreter meanwhile.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from actors.rewards.answers import (
    answer_part,
    answered_number,
    latex,
    marked_answer,
    whole_number,
    words,
)
from actors.rewards.builtin import expression_to_match, no_gold
from streamrl.interfaces import Episode

# It warns of being called without a limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(episode: Episode, *, strict: bool = True) -> float:
    """The response's answer, marked or its last expression, equals the row's, or one of the row's
    where that is a list. Numbers are compared as numbers, words as words, all else by math-verify.

    Args:
        strict: whether x = 1 differs from 1, and a set from its elements, as math-verify has it.
    """
    golds = _acceptable(expression_to_match(episode.prompt))
    text = answer_part(episode.turn)
    marked = marked_answer(text)
    given = text.strip() if marked is None else marked
    compared = [_compared(gold, given) for gold in golds]
    if any(compared):
        return 1.0
    undecided = [gold for gold, same in zip(golds, compared, strict=True) if same is None]
    parsed = [_gold(episode, gold) for gold in undecided]
    if not parsed:
        return 0.0
    expression = _parse(text if marked is None or "\\boxed" in text else f"\\boxed{{{given}}}")
    if not expression and marked is None:
        number = answered_number(text)
        return float(number is not None and number in map(whole_number, golds))
    # The limits of the call end it, with its process; math-verify's own need the main thread.
    return float(
        any(verify(gold, expression, strict=strict, timeout_seconds=None) for gold in parsed)
    )


def _acceptable(gold: Any) -> Sequence[str]:
    """Each of a list; a text is a list where it is one of texts, as JSON has it."""
    if isinstance(gold, str) and gold.lstrip().startswith('["'):
        try:
            gold = json.loads(gold)
        except ValueError:
            return [gold]
    return [str(one) for one in gold] if isinstance(gold, list | tuple) else [str(gold)]


def _compared(gold: str, given: str) -> bool | None:
    """Whether two texts, words or numbers are the same; None of what is left to math-verify, which
    takes a word for a product of letters."""
    if gold.strip() == given:
        return True
    if words(gold):
        return words(gold) == words(given)
    wanted, found = whole_number(gold), whole_number(given)
    return None if wanted is None or found is None else wanted == found


def _gold(episode: Episode, gold: str) -> list[Any]:
    found = marked_answer(gold) if "####" in gold else None
    inner = latex(gold if found is None else found)
    is_marked = "$" in inner or "\\boxed" in inner
    expected: list[Any] = parse(inner if is_marked else f"\\boxed{{{inner}}}", parsing_timeout=None)
    if not expected:
        raise no_gold(episode.prompt, gold, "math-verify reads no expression in it")
    return expected


def _parse(text: str) -> list[Any]:
    return list(parse(latex(text), parsing_timeout=None))
