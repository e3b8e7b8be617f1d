"""Built-in rewards: by a rule, mostly 1.0 for a right response and else 0.0; or the environment's.

If a row lacks what responses are compared with, its group fails. A score of 0 would train on
nothing, and a score of 1 would reward anything.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any

from actors.rewards.answers import (
    answer_of,
    answered_number,
    bare,
    choice,
    counted,
    digits_to_base,
    given_answer,
    is_changed,
    marked_answer,
    measured,
    shown_number,
    stated_answer,
    whole_number,
    words,
    written,
)
from actors.rewards.calls.limits import FinalError
from actors.rewards.code.encodings import decoded
from actors.rewards.forms import gold_of
from actors.rewards.units import Quantity
from streamrl.interfaces import Episode, Prompt, Score

# Words after a comma explain them.
_VERDICTS = ("yes", "no", "true", "false")
_OTHERWISE = re.compile(rf"\b(?:{'|'.join(_VERDICTS)}|but|if|unless|when)\b", re.IGNORECASE)
_LETTERS = re.compile(r"[A-H](?:(?:[,;&]|and)*[A-H])+")
_OPTION = re.compile(r"\A([A-J])\.\s+(?=[a-z])")

log = logging.getLogger(__name__)


def text_to_match(prompt: Prompt) -> str:
    """The answer of `exact_match`; a FinalError if it is empty."""
    if not prompt.answer.strip():
        raise no_gold(prompt, prompt.answer, "exact_match needs one that is not empty")
    return prompt.answer


def expression_to_match(prompt: Prompt) -> Any:
    """The answer of `math`, or a list of acceptable ones; a FinalError if there is none."""
    gold = gold_of(prompt)
    if isinstance(gold, Mapping):
        # `data.answer_key` may name a part of it.
        gold = decoded(prompt.answer) or gold
    if gold is None or gold == [] or isinstance(gold, Mapping) or not str(gold).strip():
        raise no_gold(prompt, gold, "math needs an expression, or a list of them")
    return gold


def math_at_once(episode: Episode) -> Score | None:
    """The reward `math` if comparing texts, words and numbers decides it; None if it takes
    math-verify, or the row has no answer."""
    try:
        golds = acceptable(expression_to_match(episode.prompt))
    except FinalError:
        return None
    text = answer_of(episode)
    given, is_whole = given_answer(text)
    same = [compared(gold, given) for gold in golds]
    if None in same and not any(same):
        return None
    return Score(float(any(same)), extracted=given if is_whole else shown_answer(text))


def shown_answer(text: str) -> str:
    """The answer of a text that gives none alone, for people and for votes: a word that it states,
    else its number, else whatever it states."""
    number, stated = answered_number(text), stated_answer(text) or ""
    return stated if words(stated) or number is None else shown_number(number)


def acceptable(gold: Any) -> Sequence[str]:
    """The acceptable answers: those of a list, or of a text that is a list of texts in JSON or
    Python. A solution, as in GSM8K and MATH, stands for the answer that it marks."""
    if isinstance(gold, str) and gold.lstrip().startswith(('["', "['")):
        gold = decoded(gold)
    golds = map(str, gold if isinstance(gold, list | tuple) else [gold])
    # If there are several boxes, all belong to the answer.
    marked = ((one, marked_answer(one) if one.count("\\boxed") < 2 else None) for one in golds)
    return [bare(inner or one) for one, inner in marked]


def letters(text: str) -> str:
    """The letters of several choices, in order; "" for any other answer.

    >>> letters("A, B, and D"), letters("ABD"), letters("A"), letters("A or B")
    ('ABD', 'ABD', '', '')
    """
    found = _LETTERS.fullmatch(written(text))
    return re.sub("[^A-H]", "", found[0]) if found else ""


def compared(gold: str, given: str) -> bool | None:
    """Whether two answers are the same text, word or number; None if math-verify must decide. (It
    would take a word for a product of letters.)"""
    wanted, found = written(gold), written(given)
    if wanted == found or (letters(gold) and letters(gold) == letters(given)):
        return True
    if len(wanted) == 1 and wanted.isalpha():
        if wanted.casefold() == found.casefold():
            return True
        # "C. elegans" may be a name, but not where a letter is wanted.
        given = _OPTION.sub(r"\1) ", given)
    match digits_to_base(gold), digits_to_base(given):
        case (_, _) as own, (_, _) as other:
            return own == other
        case None, (digits, base) if (number := whole_number(gold)) is not None:
            with suppress(ValueError):
                return number == int(digits, base)
            return False
    match choice(gold), choice(given):
        case None, (letter, said) if wanted in (letter, written(said)) or _known(gold, said):
            return True
        case (letter, said), None:
            known = written(given) in (letter, written(said)) or _known(said, given)
            return _known(gold, given) if known is None else known
    return _known(gold, given)


def _known(gold: str, given: str) -> bool | None:
    """Compare words and numbers, with their units if both have one; None if undecided."""
    if wanted_words := words(gold):
        head, _, reason = given.partition(",")
        is_explained = wanted_words in _VERDICTS and not _OTHERWISE.search(reason)
        return wanted_words == words(head if is_explained else given)
    measure, other = measured(gold), measured(given)
    if measure and other:
        if measure.unit != other.unit:
            return _same_quantity(measure, other)
        gold, given = measure.value, other.value
    elif measure and measure.is_evident:
        gold = measure.value
    elif other and re.search(r"\d(?:\s?[a-zJLNVW]|\sm\^\{?[23]\}?)\Z", given):
        # 5m and 5 m^2 are 5 where a number is wanted.
        given = other.value
    wanted, found = whole_number(gold), whole_number(given)
    if wanted is None or found is not None:
        return None if wanted is None or found is None else wanted == found
    if counted(given) == wanted:
        return True
    return False if is_changed(given) else None


def _same_quantity(one: Quantity, other: Quantity) -> bool:
    """Whether values with different units are the same quantity."""
    if one.unit.powers != other.unit.powers:
        return False
    value, other_value = whole_number(one.value), whole_number(other.value)
    if value is None or other_value is None:
        return False
    return value * one.unit.factor == other_value * other.unit.factor


def no_gold(prompt: Prompt, answer: Any, needed: str) -> FinalError:
    """The error about a row that cannot be scored."""
    return FinalError(f"{prompt.origin or 'the row'}: the answer was {answer!r}; {needed}")


def exact_match(episode: Episode, *, ignore_case: bool = False, pattern: str = "") -> Score:
    """The response equals the answer, apart from white space around it.

    With a pattern, the first group of its last match in the response is compared, or the whole
    match if it has no group.
    """
    given, answer, extracted = episode.response, text_to_match(episode.prompt), None
    if pattern:
        found = list(re.finditer(pattern, given, re.DOTALL))
        if not found:
            return Score(0.0, extracted="")
        given = extracted = found[-1][1 if found[-1].re.groups else 0] or ""
    if ignore_case:
        given, answer = given.casefold(), answer.casefold()
    return Score(float(given.strip() == answer.strip()), extracted=extracted)


def numeric_answer(episode: Episode, *, tolerance: float = 0.0) -> Score:
    """The response's number equals the answer's. A response's number is that of its marked answer
    (see `actors.rewards.answers`), else the last one in it."""
    expected, given = number_to_match(episode.prompt), answered_number(answer_of(episode))
    if given is None:
        return Score(0.0, extracted="")
    is_right = abs(expected - given) <= Fraction(str(tolerance))
    return Score(float(is_right), extracted=shown_number(given))


def regex(episode: Episode, *, pattern: str) -> float:
    """The whole response has the format `pattern`; `.` matches line ends too."""
    return float(re.fullmatch(pattern, episode.response.strip(), re.DOTALL) is not None)


def format_of_tags(episode: Episode, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """The response consists of these elements, such as <think>...</think><answer>...</answer>, in
    this order, each once and not empty; white space may stand between them. An element that the
    chat template opened (<think>) counts as the response's."""
    text = episode.turn
    elements = (rf"<{tag}>(?P<{tag}>.*?)</{tag}>" for tag in tags)
    found = re.fullmatch(r"\s*".join(elements), text.strip(), re.DOTALL)
    if found is None or not all(found[tag].strip() for tag in tags):
        return 0.0
    marks = (mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>"))
    return float(all(text.count(mark) == 1 for mark in marks))


def length(
    episode: Episode, *, max_tokens: int, min_tokens: int = 0, decay_tokens: int = 0
) -> float:
    """1 for a response of `min_tokens` to `max_tokens`; outside, it falls to 0 over
    `decay_tokens`."""
    num_tokens = episode.num_response_tokens
    excess = max(num_tokens - max_tokens, min_tokens - num_tokens, 0)
    return max(0.0, 1.0 - excess / decay_tokens) if decay_tokens else float(excess == 0)


def task(episode: Episode) -> Score:
    """The score of the prompt source's own scorer, in [0, 1]; for reasoning_gym sources. If the
    scorer raises, because it cannot read the response, the score is 0 and the metric `raised` 1."""
    row, response = episode.prompt.row, episode.response.strip()
    dataset, entry = row["dataset"], row["entry"]
    try:
        return Score(float(dataset.score_answer(response, entry)), {"raised": 0.0})
    except Exception as error:
        _warn_once(type(dataset).__name__, type(error).__name__)
        return Score(0.0, {"raised": 1.0})


@cache
def _warn_once(dataset: str, error: str) -> None:
    log.warning("the scorer of %s raises %s for a response, which scores 0", dataset, error)


def environment(episode: Episode) -> float:
    """The sum of the environment's rewards for the turns."""
    return sum(episode.turn_rewards)


def number_to_match(prompt: Prompt) -> Fraction:
    """The number of the answer; a FinalError if it has none."""
    number = whole_number(prompt.answer)
    if number is None:
        number = answered_number(prompt.answer)
    if number is None:
        raise no_gold(prompt, prompt.answer, "numeric_answer needs a number in it")
    return number
