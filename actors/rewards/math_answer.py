"""The reward `math`: mathematical equality, by math-verify if `math_at_once` does not decide it.

It runs in a separate process: sympy may take hours for an expression that a model wrote, and blocks
the interpreter meanwhile. Siblings share their gold and often their answer, so one process scores
them and caches what it has parsed and compared.

`TwoStageParser` and `clearly_differ` are shortcuts, since most of math-verify's time goes into
ANTLR's full prediction, and into `simplify` of differences that are not 0. They do not change its
answers: what the shortcuts do not decide is decided the slow way.

`near` is stricter than math-verify, which takes all numbers below a millionth as equal.
"""

import logging
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import combinations, product
from math import log10
from typing import Any

from antlr4 import CommonTokenStream
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify
from sympy import (
    And,
    Basic,
    Derivative,
    Eq,
    FiniteSet,
    I,
    Integral,
    Intersection,
    Interval,
    Limit,
    MatrixBase,
    Product,
    Rational,
    Set,
    Sum,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    Union,
    oo,
)
from sympy.core.relational import Relational

from actors.rewards.answers import (
    answer_of,
    answered_number,
    choice,
    given_answer,
    latex,
    whole_number,
    written,
)
from actors.rewards.builtin import (
    acceptable,
    compared,
    expression_to_match,
    math_at_once,
    no_gold,
    shown_answer,
)
from actors.rewards.units import FUNCTIONS, unmeasured
from streamrl.interfaces import Episode, Score

# math-verify warns when it is called without a time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_KEPT = 512
Forms = tuple[LatexExtractionConfig | ExprExtractionConfig, ...]
# math-verify's own units include letters such as c, d and t, so 2d would be 2, and all that follows
# \text or \mathrm, so 3 + 4\mathrm{i} would be 7.
_WHOLE = NormalizationConfig(malformed_operators=True, nits=True)
_FORMULA: Forms = (LatexExtractionConfig(normalization_config=_WHOLE),)
"""For a marked answer: if it is no formula, a number inside it would be another answer."""
_ANYWHERE: Forms = (*_FORMULA, ExprExtractionConfig())
_SLOW = (Derivative, Integral, Limit, Product, Sum)
_VAST = re.compile(r"\^[{(]*\d{7}|(?:\d{5}|!\))[)}]*!|\\binom\{?\d{6}")
_TOWER = re.compile(r"\^[{(]*(\d{1,6})\^[{(]*(\d{1,6})(\^?)")
_MOST_DIGITS = 6
"""The most digits that a tower of powers may have, as a power of 10."""
# Formulas as people type them without LaTeX.
_AS_TYPED = [
    (re.compile(typed), known)
    for typed, known in (
        (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
        (r"\^\s?(-\s?(?:\d{1,9}|[a-zA-Z]))", r"^{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s?\(([^()]{1,99})\)", r"\\sqrt{\1}"),
        (rf"(?<![\\a-zA-Z{{])({'|'.join(FUNCTIONS)}|pi)(?![a-zA-Z])", r"\\\1"),
    )
]
# math-verify reads H2O as 2HO, and 3:4:5 as 3/4/5.
_INDEX = re.compile(r"\\[a-zA-Z]+|(?P<letters>[a-zA-Z]{1,20})(?P<digits>\d{1,9})")
_RATIO = re.compile(r"[^:,;=<>{}$]{1,30}(?::[^:,;=<>{}$]{1,30}){2,9}")
_CLEAR = 1e-3
"""A difference, relative to the larger value or 1, that rounding cannot explain."""


class TwoStageParser(latex2sympy2.PSParser):  # type: ignore[misc]
    """Reads a formula by ANTLR's SLL prediction, which gives the same tree as LL or an error, and
    after an error by LL (Adaptive LL(*) Parsing, Parr, Harwell and Fisher 2014, section 3.2)."""

    def math(self) -> Any:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:
            lexer = self._input.tokenSource
            lexer.reset()
            self.setTokenStream(CommonTokenStream(lexer))
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


def clearly_differ(one: Any, other: Any) -> bool:
    """Whether the values of two formulas differ beyond rounding at two points; False if unknown."""
    try:
        symbols = sorted(one.free_symbols | other.free_symbols, key=str)
        if one.has(*_SLOW) or other.has(*_SLOW):
            return False
        return all(_gap_at(point, symbols, one, other) > _CLEAR for point in range(2))
    except Exception:
        return False


def _gap_at(seed: int, symbols: Sequence[Any], one: Any, other: Any) -> float:
    """The difference at a random point; NaN if a formula has no value there. Symbols get positive
    values, for which all assumptions of `simplify` hold."""
    draw = random.Random(seed)
    values = {symbol: draw.uniform(0.5, 2.5) for symbol in symbols}
    here, there = (complex(formula.evalf(15, subs=values)) for formula in (one, other))
    return abs(here - there) / max(1.0, abs(here), abs(there))


def quick_symbolic_eq(one: Any, other: Any) -> bool:
    return not clearly_differ(one, other) and bool(symbolic_eq(one, other))


def near(one: Any, other: Any, *limits: int) -> bool:
    """Whether two numbers are equal, exactly or up to rounding; n% is n or n / 100."""
    if _numeric_eq(one, other, *limits) and not _is_far(one, other):
        return True
    bare = [formula.subs(_HUNDREDTH, 1) for formula in (one, other)]
    return bare != [one, other] and _numeric_eq(*bare, *limits) and not _is_far(*bare)


def _is_far(one: Any, other: Any) -> bool:
    """Whether exact numbers differ at all, or others by more than a share `_CLEAR` of them."""
    try:
        gap = one - other
        if gap.is_rational:
            return bool(gap.doit() != 0)
        return bool(abs(gap.evalf()) > _CLEAR * max(abs(one.evalf()), abs(other.evalf())))
    except Exception:  # Without a value, sympy may raise anything.
        return False


# As math-verify reads a percent sign.
_HUNDREDTH = UnevaluatedExpr(Rational(1, 100))
symbolic_eq, _numeric_eq = grader.sympy_symbolic_eq, grader.sympy_numeric_eq
# Replaced for the whole process.
latex2sympy2.PSParser = TwoStageParser
grader.sympy_symbolic_eq, grader.sympy_numeric_eq = quick_symbolic_eq, near


def math(episodes: Sequence[Episode], *, strict: bool = True) -> list[Score]:
    """Whether each sibling's answer (marked, or its last expression) equals the row's answer, or
    one of them if the row has a list. Numbers are compared as numbers, words as words, everything
    else by math-verify.

    Args:
        strict: whether x = 1 differs from y = 1; else unknowns may have any name.
    """
    return [_score(episode, strict) for episode in episodes]


def _score(episode: Episode, strict: bool) -> Score:
    golds = acceptable(expression_to_match(episode.prompt))
    if (decided := math_at_once(episode)) is not None:
        return decided
    text = answer_of(episode)
    given, is_whole = given_answer(text)
    undecided = [gold for gold in golds if compared(gold, given) is None and not is_vast(gold)]
    if not choice(given):
        undecided = [own[1] if (own := choice(gold)) else gold for gold in undecided]
    formulas = {gold: _marked_gold(gold) for gold in undecided}
    if empty := [gold for gold, formula in formulas.items() if not _parse(formula, _FORMULA)]:
        raise no_gold(episode.prompt, empty[0], "math-verify reads no expression in it")
    expression = f"\\boxed{{{_formula(given)}}}" if is_whole else _formula(text)
    forms = _FORMULA if is_whole else _ANYWHERE
    parsed = [] if is_vast(expression) else _parse(expression, forms)
    if not is_whole and not parsed:
        number = answered_number(text)
        is_right = number is not None and number in map(whole_number, golds)
        return Score(float(is_right), extracted=shown_answer(text))
    # A choice is compared with a value by what it says.
    said = f"\\boxed{{{_formula(chosen[1])}}}" if (chosen := choice(given)) else expression
    is_right = bool(parsed) and any(
        _is_equal(formula, expression if choice(gold) else said, forms, strict)
        for gold, formula in formulas.items()
        if not is_vast(said)
    )
    # math-verify's list ends with the text that it has read.
    return Score(float(is_right), extracted=given if is_whole else str(parsed[-1]))


def is_vast(formula: str) -> bool:
    """Whether sympy would write out a number of more than about a million digits, which takes
    minutes and cannot be interrupted. Such a formula equals only what is written the same way.

    >>> is_vast("1^{1^{1^1}}"), is_vast("10000!"), is_vast("2^{2023}"), is_vast("x^{n^2}")
    (True, True, False, False)
    """
    text = written(formula)
    towers = ((int(m[1]), int(m[2]), m[3]) for m in _TOWER.finditer(text))
    return bool(_VAST.search(text)) or any(
        more or height * log10(max(base, 1)) > _MOST_DIGITS for base, height, more in towers
    )


def _formula(text: str) -> str:
    """A text as math-verify should read it: in LaTeX, without units, letters with their indices,
    and ratios of several numbers as points.

    >>> _formula("H2O"), _formula("3:4:5"), _formula("\\\\log2 + ln2"), _formula("e**-x")
    ('H_{2}O', '(3,4,5)', '\\\\log2 + \\\\ln2', 'e^{-x}')
    """
    formula = latex(unmeasured(text))
    for typed, known in _AS_TYPED:
        formula = typed.sub(known, formula)
    formula = _INDEX.sub(_indexed, formula)
    return f"({formula.replace(':', ',')})" if _RATIO.fullmatch(formula) else formula


def _indexed(found: re.Match[str]) -> str:
    is_name = found["letters"] and found["letters"].casefold() not in FUNCTIONS
    return f"{found['letters']}_{{{found['digits']}}}" if is_name else found[0]


def _marked_gold(gold: str) -> str:
    inner = _formula(gold)
    if inner.count("$") == 1:  # A currency.
        inner = inner.replace("$", "")
    return inner if "$" in inner or "\\boxed" in inner else f"\\boxed{{{inner}}}"


@lru_cache(maxsize=_KEPT)
def _is_equal(gold: str, expression: str, forms: Forms, strict: bool) -> bool:
    wanted, given = _parse(gold, _FORMULA), _parse(expression, forms)
    # The call's limits end it, with its process; math-verify's own need the main thread.
    if verify(wanted, given, strict=strict, timeout_seconds=None):
        return True
    return any(
        verify(one, other, strict=strict, timeout_seconds=None)
        for one, other in product(wanted[:1], given[:1])
        for one, other in _alike(one, other)
    )


def _alike(wanted: Any, given: Any) -> Iterator[tuple[Basic, Basic]]:
    """Yield other readings of two formulas in which they may be equal: a solved inequality and an
    interval as sets, a row or a column as a point, and i as the imaginary unit."""
    if isinstance(wanted, MatrixBase) != isinstance(given, MatrixBase):
        yield _point(wanted), _point(given)
    complex_ones = _complex(wanted), _complex(given)
    if complex_ones != (wanted, given):
        yield complex_ones
    one, other = solution_set(wanted), solution_set(given)
    if one and other and (one[0] == other[0] or None in (one[0], other[0])):
        yield one[1], other[1]


def _complex(formula: Any) -> Any:
    """The formula with i as the imaginary unit; unchanged if i cannot be that, as in an
    inequality."""
    units = [s for s in getattr(formula, "free_symbols", ()) if s.name == "i"]
    with suppress(TypeError, ValueError):
        return formula.subs(dict.fromkeys(units, I)) if units else formula
    return formula


def _point(formula: Any) -> Any:
    is_line = isinstance(formula, MatrixBase) and min(formula.shape) == 1 < max(formula.shape)
    return Tuple(*formula) if is_line else formula


def solution_set(formula: Any) -> tuple[Symbol | None, Set] | None:
    """The set of numbers that an interval, a solved inequality or several disjoint ones describe,
    with the unknown if it is named. None for others: 2x < 4 may be the question itself."""
    match formula:
        case Interval() | Union():
            return None, formula
        case Eq(lhs=Symbol() as unknown, rhs=Interval() | Union() as inside):
            return unknown, inside
        case And() | FiniteSet() | Tuple():
            parts = [solution_set(part) for part in formula.args]
            unknowns = {part[0] for part in parts if part}
            if None in parts or len(unknowns) != 1:
                return None
            sets = [part[1] for part in parts if part]
            if isinstance(formula, And):
                return unknowns.pop(), Intersection(*sets)
            # Overlapping inequalities are meant to hold together, so they have no union.
            is_apart = all(one.is_disjoint(other) for one, other in combinations(sets, 2))
            return (unknowns.pop(), Union(*sets)) if is_apart else None
        case Relational() if not isinstance(formula, Eq):
            return _solved(formula if isinstance(formula.lhs, Symbol) else formula.reversed)
    return None


def _solved(inequality: Relational) -> tuple[Symbol, Set] | None:
    unknown, bound = inequality.lhs, inequality.rhs
    # 50% is 50 * (1 / 100) unevaluated, and sympy cannot tell whether that is real.
    bound = bound if bound.has(*_SLOW) else bound.doit()
    is_real = bound.is_extended_real or (bound.is_extended_real is None and bound.has(*_SLOW))
    if not isinstance(unknown, Symbol) or not (bound.is_number and is_real):
        return None
    # sympy's as_set takes 400 times as long.
    match inequality.rel_op:
        case "<":
            return unknown, Interval.open(-oo, bound)
        case "<=":
            return unknown, Interval(-oo, bound)
        case ">":
            return unknown, Interval.open(bound, oo)
        case ">=":
            return unknown, Interval(bound, oo)
    return unknown, Union(Interval.open(-oo, bound), Interval.open(bound, oo))


@lru_cache(maxsize=_KEPT)
def _parse(text: str, forms: Forms) -> list[Any]:
    return list(parse(both_signs(text), forms, parsing_timeout=None))


def both_signs(text: str) -> str:
    """Replace a boxed formula that contains a plus-minus sign by a box with the two formulas that
    it stands for.

    >>> both_signs("\\\\boxed{\\\\frac{1 \\\\pm x}{2}}"), both_signs("\\\\boxed{\\\\pm 1}")
    ('\\\\boxed{\\\\frac{1 + x}{2}, \\\\frac{1 - x}{2}}', '\\\\boxed{\\\\pm 1}')
    """
    inner = text.removeprefix("\\boxed{").removesuffix("}")
    is_boxed = text == f"\\boxed{{{inner}}}" and "," not in inner
    # With two signs it would stand for four.
    if not is_boxed or inner.count("\\pm") != 1 or not re.search(r"\{[^{}]*?\\pm", inner):
        return text
    upper = inner.replace("\\pm", "+").replace("\\mp", "-")
    lower = inner.replace("\\pm", "-").replace("\\mp", "+")
    return f"\\boxed{{{upper}, {lower}}}"
