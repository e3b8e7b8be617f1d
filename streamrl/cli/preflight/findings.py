"""What a check finds: a problem that keeps a run from starting, a warning, or what it looked at.

Invariant: a problem or a warning begins with the setting that it is about.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from streamrl.errors import ConfigError

_SETTING = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")


class Kind(StrEnum):
    PROBLEM = "problem"
    WARNING = "warning"
    FACT = "fact"


@dataclass(frozen=True)
class Finding:
    kind: Kind
    sentence: str

    def located(self, origins: Mapping[str, str]) -> "Finding":
        """With the place where the setting was given, if it was."""
        setting = _SETTING.match(self.sentence)
        origin = origins.get(setting[0]) if setting else None
        located = f"{self.sentence} ({origin})"
        return self if origin is None or self.kind is Kind.FACT else Finding(self.kind, located)


def problem(sentence: str) -> Finding:
    return Finding(Kind.PROBLEM, sentence)


def warning(sentence: str) -> Finding:
    return Finding(Kind.WARNING, sentence)


def fact(sentence: str) -> Finding:
    return Finding(Kind.FACT, sentence)


def refusal(look_up: Callable[[], object]) -> Iterator[Finding]:
    """The problem for which a daemon's own look-up refuses; none if it succeeds."""
    try:
        look_up()
    except ConfigError as error:
        yield problem(str(error))
