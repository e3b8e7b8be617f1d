"""What a look at something finds: that it is in order, a warning, or a problem, in a sentence.

`streamrl check` finds so before a run and `streamrl.diagnosis` while there is one.

Invariant: a sentence about a setting begins with its name, which is the cause where none is given.
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

    `where` is the place where the setting was given; `remedy` is "" where nothing is to be done, or
    where the sentence has it.
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
    """What a finding is about: this machine and the servers that a run uses; the model's files;
    prompts, rewards and tools; settings; memory of host and GPUs; a run that goes on."""

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
        """The problem for which a daemon's own look-up refuses; none if it succeeds."""
        try:
            look_up(*arguments)
        except ConfigError as error:
            yield self.problem(str(error))

    def up_to_refusal(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        """These, and as the last one the problem for which a look-up among them refuses."""
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
