"""Findings: that something is in order, a warning, or a problem, in one sentence.

`streamrl check` makes them before a run and `streamrl.diagnosis` during one.

Invariant: a sentence about a setting begins with its name, which is the finding's cause if no other
is given.
"""

import re
from collections.abc import Callable, Iterator
from enum import StrEnum

from msgspec import Struct

from streamrl.errors import ConfigError

SETTING = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
"""A setting's name in a sentence."""


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(Struct, frozen=True):
    """`cause` is a name for programs: a setting, a part of the machine, or why a run stalls.

    `where` says where the setting was given; `remedy` is "" if there is nothing to do, or if the
    sentence says it.
    """

    area: "Area"
    severity: Severity
    cause: str
    sentence: str
    where: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} ({self.where})" if self.where else self.sentence


class Area(StrEnum):
    """What a finding is about: this machine and the servers that a run uses; settings; the model's
    files; prompts, rewards and tools; memory of host and GPUs; a run in progress."""

    MACHINE = "machine"
    CONFIGURATION = "configuration"
    MODEL = "model"
    DATA = "data"
    MEMORY = "memory"
    RUN = "run"

    def ok(self, sentence: str, *, cause: str = "") -> Finding:
        return self._finding(Severity.OK, sentence, "", cause)

    def warning(self, sentence: str, remedy: str = "", *, cause: str = "") -> Finding:
        return self._finding(Severity.WARNING, sentence, remedy, cause)

    def problem(self, sentence: str, remedy: str = "", *, cause: str = "") -> Finding:
        return self._finding(Severity.PROBLEM, sentence, remedy, cause)

    def _finding(self, severity: Severity, sentence: str, remedy: str, cause: str) -> Finding:
        setting = SETTING.match(sentence)
        name = cause or (setting[0] if setting else "")
        return Finding(self, severity, name, sentence, remedy=remedy)

    def refusal(self, look_up: Callable[..., object], *arguments: object) -> Iterator[Finding]:
        """The problem that makes a daemon's own look-up fail; nothing if it succeeds."""
        try:
            look_up(*arguments)
        except ConfigError as error:
            yield self.problem(str(error))

    def up_to_refusal(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        """The findings, up to a look-up among them that fails, whose problem is the last one."""
        try:
            yield from findings
        except ConfigError as error:
            yield self.problem(str(error))


CONFIGURATION, DATA, MACHINE, MEMORY, MODEL = (
    Area.CONFIGURATION,
    Area.DATA,
    Area.MACHINE,
    Area.MEMORY,
    Area.MODEL,
)
