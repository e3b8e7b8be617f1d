"""Built-in rewards: by a rule, 1.0 where the response is right, else 0.0; or the environment's."""

import re
from decimal import Decimal, InvalidOperation

from streamrl.interfaces import Episode

_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"(?:####|\\boxed\{{)\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)


def exact_match(episode: Episode) -> float:
    """The response is the answer, but for white space around it."""
    return float(episode.response.strip() == episode.prompt.answer.strip())


def numeric_answer(episode: Episode, *, tolerance: float = 0.0) -> float:
    """The response's number equals the answer's: the last one behind "####" or in a box (the
    conventions of GSM8K, arXiv 2110.14168, and MATH), else the last number there is."""
    expected, given = extract_number(episode.prompt.answer), extract_number(episode.response)
    if expected is None or given is None:
        return 0.0
    return float(abs(expected - given) <= Decimal(str(tolerance)))


def regex(episode: Episode, *, pattern: str) -> float:
    """The whole response has the format `pattern`; `.` matches line ends too."""
    return float(re.fullmatch(pattern, episode.response.strip(), re.DOTALL) is not None)


def task(episode: Episode) -> float:
    """The prompt source's own scorer, in [0, 1]; for reasoning_gym sources."""
    row = episode.prompt.row
    return float(row["dataset"].score_answer(episode.response.strip(), row["entry"]))


def environment(episode: Episode) -> float:
    """The sum of what the environment gave for each turn."""
    return sum(episode.turn_rewards)


def extract_number(text: str) -> Decimal | None:
    """The number a text answers with, or None.

    >>> extract_number("3 + 4 = 7, so #### 1,007")
    Decimal('1007')
    """
    found = _MARKED.findall(text) or _ANY.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None
