"""The quick ways of the reward `math` answer as math-verify does without them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from latex2sympy2_extended import latex2sympy2
from math_verify import grader, parse, verify
from sympy import Basic, Float, Function, Integer, Sum, cos, factorial, sin, sqrt, srepr, symbols

from actors.rewards import math_answer
from actors.rewards.math_answer import TwoStageParser, clearly_differ
from tests.unit.rewards.test_answers import KINDS

x, y, n = symbols("x y n", real=True)
PARTS = ("x", "y", "n", "\\pi", "e", "i", "2", "10", "0.5", "1,000", "x_1", "f(x)", "\\infty")
FORMS = (
    *("{} + {}", "{}{}", "{} {}", "{} \\cdot {}", "{}/{}", "-{}{}", "\\frac{{{}}}{{{}}}"),
    *("\\sqrt[3]{{{}}}{}", "{}^{{{}}}", "({}){}", "\\left({}\\right){}", "\\sin {}({})"),
    *("\\log_{{2}} {}{}", "|{}|{}", "\\binom{{{}}}{{{}}}", "{}!{}", "{}\\%{}", "{}^\\circ {}"),
    *("\\sum_{{k=1}}^{{n}} {}{}", "\\int_0^1 {} dx{}", "{} \\pm {}", "{}{}'", "\\overline{{{}}}{}"),
)
WHOLE = (
    *("{}", "{} = {}", "{} < {} \\leq 3", "({}, {})", "[{}, {})", "\\{{{}, {}\\}}", "{}, {}"),
    *("(-\\infty, {}) \\cup [{}, \\infty)", "x \\in [{}, {}]", "x = {} \\text{{ or }} x = {}"),
    *("\\lef({}, {}\\right)", "\\fra{{{}}}{{{}}}", "{} \\neq {}", "({}, {}", "{}; {}"),
)
PAIRS = (
    ("2x + 1", "1 + 2x", True),
    ("(x+1)^2", "x^2 + 2x + 1", True),
    ("(x+1)^2", "x^2 + 2x", False),
    (r"\sin^2 x + \cos^2 x", "1", True),
    (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", True),
    (r"\sqrt{x^2}", "x", False),
    (r"x^2 + 10^{-20}", "x^2", False),
    (r"11\sqrt{2}", r"2\sqrt{11}", False),
    (r"\frac{2x}{3}", r"\dfrac{2}{3}x", True),
    ("(1, 2x)", "(1, x + x)", True),
    ("(1, 2x)", "(1, 3x)", False),
    (r"[1, \sqrt{8}]", r"[1, 2\sqrt{2}]", True),
    ("y = 2x + 3", "y = 3 + 2x", True),
    ("y = 2x + 3", "y = 2x + 4", False),
    (r"\frac{1}{3}", "0.333333", True),
    (r"n!", r"n(n-1)!", True),
    (r"\sum_{k=1}^{3} k", "6", True),
    ("x < 5", r"(-\infty, 5)", True),
)


@contextmanager
def slow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(latex2sympy2, "PSParser", TwoStageParser.__base__)
        patched.setattr(grader, "sympy_symbolic_eq", math_answer.symbolic_eq)
        yield


def written_by(draw: random.Random) -> str:
    """A formula, or what a slip of the pen made of one."""

    def part(depth: int = 0) -> str:
        if depth > 1 or draw.random() < 0.3:
            return draw.choice(PARTS)
        return draw.choice(FORMS).format(part(depth + 1), part(depth + 1))

    return draw.choice(WHOLE).format(part(), part())


def tree(text: str) -> str:
    try:
        return srepr(latex2sympy2.latex2sympy(text, is_real=True))
    except Exception as error:
        return f"refused: {type(error).__name__}"


def test_formulas_are_read_as_before():
    draw = random.Random(0)
    texts = [*KINDS, *(written_by(draw) for _ in range(20))]
    ours = [tree(text) for text in texts]
    with slow():
        theirs = [tree(text) for text in texts]
    for text, one, other in zip(texts, ours, theirs, strict=True):
        assert one == other, text
    assert sum(one.startswith("refused") for one in ours) < 0.6 * len(ours)


def answer(gold: str, given: str) -> bool:
    return bool(verify(*(parse(f"\\boxed{{{t}}}") for t in (gold, given)), timeout_seconds=None))


@pytest.mark.parametrize(("gold", "given", "is_equal"), PAIRS)
def test_formulas_are_equal_as_before(gold: str, given: str, is_equal: bool):
    assert answer(gold, given) == is_equal
    with slow():
        assert answer(gold, given) == is_equal


def test_a_difference_is_clear_where_numbers_show_it(monkeypatch):
    monkeypatch.setattr(math_answer, "symbolic_eq", lambda *_: pytest.fail("it was simplified"))
    assert isinstance(latex2sympy2._Latex2Sympy().create_parser("x"), TwoStageParser)
    assert not answer("11\\sqrt{2} x", "2\\sqrt{11} x")
    assert clearly_differ(x + 1, x + 2)
    assert clearly_differ(x, y)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sin(x) ** 2 + cos(x) ** 2, Integer(1)),
        (sqrt(x**2), x),
        (Float(1.1) * 10**20 * x, 11 * 10**19 * x),
        (Integer(10) ** -20 * x, 2 * Integer(10) ** -20 * x),
        (Function("f")(x), Function("f")(y)),
        (Sum(n, (n, 1, 3)), Integer(7)),
        (1 / (x - x + 0 * y), Integer(1)),
        (factorial(n), n * factorial(n - 1)),
    ],
)
def test_it_is_not_clear_elsewhere(one: Basic, other: Basic):
    assert not clearly_differ(one, other)
