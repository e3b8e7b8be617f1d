"""The reward `math`: mathematical equality, by math-verify.

It runs in a process of its own: sympy may take hours over an expression that a model wrote, and
holds the interpreter meanwhile.
"""

import logging

from math_verify import parse, verify

from actors.rewards.builtin import expression_to_match, no_gold
from streamrl.interfaces import Episode

# It warns of being called without a limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(episode: Episode, *, strict: bool = True) -> float:
    """The response's expression, boxed or last, equals the answer's.

    Args:
        strict: whether x = 1 differs from 1, and a set from its elements, as math-verify has it.
    """
    answer = expression_to_match(episode.prompt)
    marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    # The limits of the call end it, with its process; math-verify's own need the main thread.
    expected, given = (
        parse(marked, parsing_timeout=None),
        parse(episode.response, parsing_timeout=None),
    )
    if not expected:
        raise no_gold(episode.prompt, answer, "math-verify reads no expression in it")
    return float(verify(expected, given, strict=strict, timeout_seconds=None))
