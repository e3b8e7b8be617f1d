"""Which settings and features of verl, ROLL, TRL and prime-rl StreamRL has, and which are missing.

Invariant: `streamrl check` and the page say the same text about a name. A name that loses nothing
here is not on the page: `streamrl check` and `streamrl import` tell its name here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from streamrl.config.loading.foreign_names import SYSTEMS, ForeignName, foreign_names

STATUSES: Mapping[str, str] = {
    "have": "a setting, or a choice of one",
    "fixed": "always so, without a setting",
    "partly": "a setting that does less; the note says what",
    "missing": "not there",
    "not applicable": "nothing here that it could set",
}
"""The meaning of each status, by its name."""
_MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def entries() -> tuple[ForeignName, ...]:
    """Return all lines, section by section."""
    return tuple(name for system in SYSTEMS for name in _by_section(foreign_names(system).values()))


def _by_section(names: Iterable[ForeignName]) -> list[ForeignName]:
    names = list(names)
    order = list(dict.fromkeys(name.section for name in names))
    return sorted(names, key=lambda name: order.index(name.section))


def counts(found: Iterable[ForeignName]) -> str:
    """Return a table of how many names of each system have each status."""
    found = list(found)
    systems = list(dict.fromkeys(entry.system for entry in found))
    rows = (
        f"| {status} | {' | '.join(str(_count(found, system, status)) for system in systems)} "
        f"| {meaning} |\n"
        for status, meaning in STATUSES.items()
    )
    header = f"| status | {' | '.join(systems)} | meaning |\n|---|{'---|' * len(systems)}---|\n"
    return header + "".join(rows)


def parts(system: str, found: Iterable[ForeignName]) -> Iterator[str]:
    """Yield one system in Markdown: a table of names whose setting here does less, and a list of
    what is missing; names with the same counterpart share a line."""
    own = [entry for entry in found if entry.system == system and is_shown(entry)]
    set_here = [entry for entry in own if entry.status == "partly"]
    often = Counter(note for _, note in _same(set_here))
    marks = dict(zip((note for note, count in often.items() if count > 2), _MARKS, strict=False))
    legend = "".join(f"{mark} {note[:1].upper()}{note[1:]}.  \n" for note, mark in marks.items())
    yield f"## {system}\n" + (f"\n{legend}" if legend else "")
    rows = "".join(
        f"| {_names(names)} | {here}{_limits(note, marks)} |\n"
        for (here, note), names in _same(set_here).items()
    )
    if rows:
        title = f"### In part ({system})"
        yield f"{title}\n\n| in {system} | here |\n|---|---|\n{rows}"
    lines = "".join(
        f"- {_names(names)}: {here.removeprefix('(').removesuffix(')')}{_limits(note, {})}\n"
        for (here, note), names in _same(e for e in own if e.status == "missing").items()
    )
    if lines:
        yield f"### Missing ({system})\n\n{lines}"


def is_shown(entry: ForeignName) -> bool:
    """Whether the name loses something here."""
    return entry.status in ("partly", "missing")


def _same(members: Iterable[ForeignName]) -> dict[tuple[str, str], list[str]]:
    """Return the names that are the same here, by setting and note."""
    names: dict[tuple[str, str], list[str]] = {}
    for entry in members:
        names.setdefault((entry.here, entry.note), []).append(entry.name)
    return names


def _names(names: list[str]) -> str:
    return ", ".join(name if " " in name else f"`{name}`" for name in names)


def _limits(note: str, marks: Mapping[str, str]) -> str:
    return marks.get(note) or (f"; {note}" if note else "")


def _count(found: Iterable[ForeignName], system: str, status: str) -> int:
    return sum(entry.system == system and entry.status == status for entry in found)
