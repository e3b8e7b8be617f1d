"""Arithmetic that is too long to do in one's head, with a calculator."""

from functools import partial

import numpy as np

from actors.environments.tasks.question import Question, QuestionEnvironment
from actors.tools.calculator import Calculator
from streamrl.config.generator import ToolSettings


def calculator(*, num_terms: int = 3, max_number: int = 999) -> QuestionEnvironment:
    """
    Args:
        num_terms: numbers of an expression.
        max_number: the largest of them.

    Raises:
        ValueError: there would be nothing to calculate.
    """
    if num_terms < 2 or max_number < 1:
        raise ValueError(
            f"num_terms {num_terms} and max_number {max_number}: num_terms >= 2, max_number >= 1"
        )
    return QuestionEnvironment(partial(_ask, num_terms=num_terms, max_number=max_number))


def _ask(seed: int, *, num_terms: int, max_number: int) -> Question:
    rng = np.random.default_rng(seed)
    first, *others = (int(n) for n in rng.integers(1, max_number + 1, num_terms))
    text, value = str(first), first
    for number, is_product in zip(others, rng.random(len(others)) < 0.5, strict=True):
        text = f"({text}) * {number}" if is_product else f"{text} + {number}"
        value = value * number if is_product else value + number
    question = f"What is {text}? Use the calculator, then answer with the number."
    return Question(question, value, (Calculator(ToolSettings(tool="calculator"), "calculator"),))
