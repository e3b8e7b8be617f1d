"""What each setting and feature of verl, ROLL, TRL and prime-rl is here, and what is missing.

Invariant: what `streamrl check` says of a name and what the page says of it are one text.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from streamrl.config.loading.foreign_names import SYSTEMS, ForeignName, foreign_names

STATUSES: Mapping[str, str] = {
    "have": "a setting, or a choice of one",
    "fixed": "always so, without a setting",
    "partly": "a setting that does less; the note says what",
    "missing": "not there",
    "not applicable": "nothing here that it could set",
}
"""By name, what it means."""
_PREFIXES = {"fixed": "no setting: ", "missing": "**missing**: ", "not applicable": "none: "}


def entries() -> tuple[ForeignName, ...]:
    """All lines, section by section."""
    return tuple(name for system in SYSTEMS for name in _by_section(foreign_names(system).values()))


def _by_section(names: Iterable[ForeignName]) -> list[ForeignName]:
    names = list(names)
    order = list(dict.fromkeys(name.section for name in names))
    return sorted(names, key=lambda name: order.index(name.section))


def counts(found: Iterable[ForeignName]) -> str:
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


def tables(system: str, found: Iterable[ForeignName]) -> Iterator[str]:
    """The sections of one system in Markdown; names that are one thing here share a row."""
    yield f"## {system}\n"
    own = [entry for entry in found if entry.system == system]
    for section, members in groupby(own, lambda entry: entry.section):
        names: dict[tuple[str, str, str], list[str]] = {}
        for entry in members:
            names.setdefault((entry.status, entry.here, entry.note), []).append(entry.name)
        rows = "".join(_row(shared, *what) for what, shared in names.items())
        yield f"### {section} ({system})\n\n| in {system} | here |\n|---|---|\n{rows}"


def _count(found: Iterable[ForeignName], system: str, status: str) -> int:
    return sum(entry.system == system and entry.status == status for entry in found)


def _row(names: list[str], status: str, here: str, note: str) -> str:
    shown = ", ".join(name if " " in name else f"`{name}`" for name in names)
    what = _PREFIXES.get(status, "") + here.strip("()")
    limits = f"; {'in part: ' * (status == 'partly')}{note}" if note else ""
    return f"| {shown} | {what}{limits} |\n"
