"""The answer that a response gives, as text: responses with the same one vote together.

A reward that reads an answer out of the response compares that; of any other one the whole response
is the answer.
"""

from collections.abc import Callable, Collection
from typing import TypeAlias

from actors.rewards.builtin import extract_number

AnswerOf: TypeAlias = Callable[[str], str]


def answer_of(rewards: Collection[str]) -> AnswerOf:
    """That of the rewards of a prompt, by their names."""
    return _number if "numeric_answer" in rewards else str.strip


def _number(response: str) -> str:
    number = extract_number(response)
    return response.strip() if number is None else str(number.normalize())
