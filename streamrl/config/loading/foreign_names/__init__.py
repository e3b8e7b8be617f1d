"""Settings by the names that other systems give them, for those who come from there.

One file has the names of one release, such as verl-0.9.1.csv; one without a release has those that
its newest does not list: of earlier releases, and of what is given beside its files.
`python -m docs.foreign_names` makes the file of a new release. The columns:

    section, name    what it belongs to, and the name; `*.` before it stands for any sections or
                     none, `.*` behind it for all keys below
    status, note     have: a setting, or a choice of one; fixed: always so; partly: a setting that
                     does less, as the note says; missing; or not applicable
    here             our setting; in parentheses what holds instead of one
    default          of that release
    values           as values.py has them

Invariant: a setting that a file names exists here (a test reads them all). Files are read when a
key is unknown, and not before.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

SYSTEMS = ("verl", "ROLL", "TRL", "prime-rl")
IMPORTED = ("verl", "ROLL", "TRL")
"""The systems whose files `streamrl import` translates."""
USUAL = "usual"
"""Names that many systems and papers use, and no system's file has."""


class ForeignName(NamedTuple):
    """One line of a file; `system` is USUAL for common names."""

    system: str
    section: str
    name: str
    status: str
    here: str
    note: str = ""
    default: str = ""
    values: str = ""

    def sentence(self, values: str = "", *, by_last_part: bool = False) -> str:
        """The answer to a key with this name, or with only its last part; `values` are our settings
        if the value has other names too."""
        has_none, is_usual = self.here.startswith("("), self.system == USUAL
        if by_last_part:
            calls = "other systems call" if is_usual else f"{self.system} calls"
            here = "has no setting here" if has_none else "is here"
            whose = f"unknown key; what {calls} {self.name.rpartition('.')[2]}"
        else:
            here = "there is no such setting here" if has_none else "here it is"
            whose = "unknown key;" if is_usual else f"{self.system}'s name;"
        return f"{whose} {here} {values or self.here}"


@cache
def foreign_names(system: str) -> Mapping[str, ForeignName]:
    """All lines of one of SYSTEMS, or of USUAL, by name."""
    own = re.compile(rf"{system}(-\d.*)?")
    files = sorted(file for file in Path(__file__).parent.glob("*.csv") if own.fullmatch(file.stem))
    return {line["name"]: ForeignName(system, **line) for file in files for line in _lines(file)}


def is_foreign_section(key: str) -> bool:
    """Whether another system has a section of this name."""
    return any(f".{key}." in f".{name}" for system in SYSTEMS for name in foreign_names(system))


def find_foreign_name(path: str, system: str = "", first: str = "") -> ForeignName | None:
    """What a refused key is called here, if another system has it, the `first` one before others,
    with any sections before it; or what a key of this system is.

    >>> find_foreign_name("actor_rollout_ref.rollout.n").here
    'generator.group_size'
    """
    parts = path.split(".")
    for start in range(len(parts)):
        for key in _keys(parts[start:], is_whole=start == 0):
            for owner in (system,) if system else (*filter(None, [first]), *SYSTEMS, USUAL):
                name = foreign_names(owner).get(key)
                if name is not None and (system or name.here != path):
                    return name
    if system:
        return None
    ends = (n for system in SYSTEMS for n in foreign_names(system).values() if "." in path)
    return next((name for name in ends if name.name.endswith(f".{path}")), None)


def guess_foreign_name(path: str) -> ForeignName | None:
    """Find by the last part of the key alone; for names with sections, only by a last part of at
    least two words with a single meaning."""
    last = path.rpartition(".")[2]
    for system in (*SYSTEMS, USUAL):
        name = foreign_names(system).get(last)
        if name is not None and name.here != path:
            return name
    for system in SYSTEMS if "_" in last else ():
        same = [n for n in foreign_names(system).values() if n.name.rpartition(".")[2] == last]
        if {name.here for name in same} - {path} and len({name.here for name in same}) == 1:
            return same[0]
    return None


def _keys(parts: list[str], *, is_whole: bool) -> Iterator[str]:
    """The names in a file for the end of a key: its own, then those of the records that may contain
    it, innermost first."""
    key = ".".join(parts)
    names = [key, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
    yield from (name for name in names if is_whole or "." in name)
    yield from (f"*.{name}" for name in names)


def _lines(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
