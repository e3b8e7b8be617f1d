"""The reward `math`: mathematical equality, by math-verify where `math_at_once` does not decide it.

It runs in a process of its own: sympy may take hours over an expression that a model wrote, and
holds the interpreter meanwhile. Siblings have one gold and often one answer, so they are scored by
one process, which keeps what it has read and compared.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from actors.rewards.answers import (
    answer_part,
    answered_number,
    latex,
    marked_answer,
    shown_number,
    whole_number,
)
from actors.rewards.builtin import (
    acceptable,
    compared,
    expression_to_match,
    math_at_once,
    no_gold,
)
from streamrl.interfaces import Episode, Score

# It warns of being called without a limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_KEPT = 512


def math(episodes: Sequence[Episode], *, strict: bool = True) -> list[Score]:
    """Whether the answer of each sibling, marked or its last expression, equals the row's, or one
    of the row's where that is a list. Numbers are compared as numbers, words as words, all else by
    math-verify.

    Args:
        strict: whether x = 1 differs from 1, and a set from its elements, as math-verify has it.
    """
    return [_score(episode, strict) for episode in episodes]


def _score(episode: Episode, strict: bool) -> Score:
    golds = acceptable(expression_to_match(episode.prompt))
    if (decided := math_at_once(episode)) is not None:
        return decided
    text = answer_part(episode.turn)
    marked = marked_answer(text)
    given = text.strip() if marked is None else marked
    undecided = [gold for gold in golds if compared(gold, given) is None]
    if empty := [gold for gold in undecided if not _parse(_marked_gold(gold))]:
        raise no_gold(episode.prompt, empty[0], "math-verify reads no expression in it")
    expression = latex(text if marked is None else f"\\boxed{{{marked}}}")
    parsed = _parse(expression)
    if marked is None and not parsed:
        number = answered_number(text)
        is_right = number is not None and number in map(whole_number, golds)
        return Score(float(is_right), extracted="" if number is None else shown_number(number))
    is_right = any(_is_equal(_marked_gold(gold), expression, strict) for gold in undecided)
    # math-verify ends its list with the text that it has read.
    return Score(float(is_right), extracted=str(parsed[-1]) if marked is None else marked)


def _marked_gold(gold: str) -> str:
    found = marked_answer(gold) if "####" in gold else None
    inner = latex(gold if found is None else found)
    return inner if "$" in inner or "\\boxed" in inner else f"\\boxed{{{inner}}}"


@lru_cache(maxsize=_KEPT)
def _is_equal(gold: str, expression: str, strict: bool) -> bool:
    # The limits of the call end it, with its process; math-verify's own need the main thread.
    return bool(verify(_parse(gold), _parse(expression), strict=strict, timeout_seconds=None))


@lru_cache(maxsize=_KEPT)
def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
