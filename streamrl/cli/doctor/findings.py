"""What a check of the machine finds: ok, a warning, or a problem, with its remedy in a sentence."""

from enum import StrEnum

from msgspec import Struct


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    PROBLEM = "problem"


class Finding(Struct, frozen=True):
    """`check` is a name for programs; `remedy` is "" where nothing is to be done, or where the
    sentence has it."""

    level: Level
    check: str
    sentence: str
    remedy: str = ""


def ok(check: str, sentence: str) -> Finding:
    return Finding(Level.OK, check, sentence)


def warn(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(Level.WARN, check, sentence, remedy)


def problem(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, check, sentence, remedy)
