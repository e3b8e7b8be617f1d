"""What each setting and feature of verl and ROLL is here, and what is missing: docs/coverage.csv.

    system, section, name    as users of verl or ROLL know it, and the heading that it stands under
    status                   one of STATUSES
    here                     what it is here; empty for a setting, which `foreign_names` has
    note                     the limits

Invariant: what `streamrl check` says of a name and what the page says of it are one text.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from streamrl.config.loading.foreign_names import FOREIGN_NAMES

PATH = Path(__file__).parent / "coverage.csv"
STATUSES: Mapping[str, str] = {
    "have": "a setting, or a choice of one",
    "fixed": "always so, without a setting",
    "partly": "a setting that does less; the note says what",
    "missing": "not there",
    "not applicable": "nothing here that it could set",
}
"""By name, what it means."""
_PREFIXES = {"fixed": "no setting: ", "missing": "**missing**: ", "not applicable": "none: "}


class Entry(NamedTuple):
    """One line of the file, with `here` filled in."""

    system: str
    section: str
    name: str
    status: str
    here: str
    note: str


def entries() -> tuple[Entry, ...]:
    """All lines, in their order."""
    with PATH.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return tuple(
        Entry(**(line | {"here": line["here"] or FOREIGN_NAMES[line["system"]][line["name"]]}))
        for line in lines
    )


def counts(found: Iterable[Entry]) -> str:
    """How many names of each system have each status, as a table."""
    found = list(found)
    systems = list(dict.fromkeys(entry.system for entry in found))
    rows = (
        f"| {status} | {' | '.join(str(_count(found, system, status)) for system in systems)} "
        f"| {meaning} |\n"
        for status, meaning in STATUSES.items()
    )
    header = f"| status | {' | '.join(systems)} | meaning |\n|---|{'---|' * len(systems)}---|\n"
    return header + "".join(rows)


def tables(system: str, found: Iterable[Entry]) -> Iterator[str]:
    """The sections of one system in Markdown; names that are one thing here share a row."""
    yield f"## {system}\n"
    own = [entry for entry in found if entry.system == system]
    for section, members in groupby(own, lambda entry: entry.section):
        names: dict[tuple[str, str, str], list[str]] = {}
        for entry in members:
            names.setdefault((entry.status, entry.here, entry.note), []).append(entry.name)
        rows = "".join(_row(shared, *what) for what, shared in names.items())
        yield f"### {section} ({system})\n\n| in {system} | here |\n|---|---|\n{rows}"


def _count(found: Iterable[Entry], system: str, status: str) -> int:
    return sum(entry.system == system and entry.status == status for entry in found)


def _row(names: list[str], status: str, here: str, note: str) -> str:
    shown = ", ".join(name if " " in name else f"`{name}`" for name in names)
    what = _PREFIXES.get(status, "") + here.strip("()")
    limits = f"; {'in part: ' * (status == 'partly')}{note}" if note else ""
    return f"| {shown} | {what}{limits} |\n"
