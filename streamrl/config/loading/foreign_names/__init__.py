"""Settings by the names that other systems give them, for those who come from there.

Invariant: a setting that a table names exists here (a test reads them all); one in parentheses has
no setting here, and the parentheses say what holds instead. A name that ends in `.*` is a record,
with whatever keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from streamrl.config.loading.foreign_names.prime_rl import PRIME_RL
from streamrl.config.loading.foreign_names.roll import ROLL
from streamrl.config.loading.foreign_names.trl import TRL
from streamrl.config.loading.foreign_names.usual import USUAL
from streamrl.config.loading.foreign_names.verl import VERL

FOREIGN_NAMES: Mapping[str, Mapping[str, str]] = {
    "verl": VERL,
    "ROLL": ROLL,
    "TRL": TRL,
    "prime-rl": PRIME_RL,
}
"""By system: its name, and our setting."""

FOREIGN_SECTIONS = frozenset(
    name.partition(".")[0] for names in FOREIGN_NAMES.values() for name in names if "." in name
)


class ForeignName(NamedTuple):
    """`system` is "" for a name that is nobody's own."""

    system: str
    setting: str

    @property
    def sentence(self) -> str:
        whose = f"{self.system}'s name" if self.system else "unknown key"
        if self.setting.startswith("("):
            return f"{whose}; there is no such setting here {self.setting}"
        return f"{whose}; here it is {self.setting}"


def find_foreign_name(path: str) -> ForeignName | None:
    """What a refused key is called here, if another system has it.

    A name counts with any section before it, such as `learner.num_generations`; a dotted name also
    by its last part, where that has one meaning and at least two words.

    >>> find_foreign_name("actor_rollout_ref.rollout.n").setting
    'generator.group_size'
    """
    parts = path.split(".")
    suffixes = [
        suffix
        for start in range(len(parts))
        for suffix in (".".join(parts[start:]), *_records(parts[start:]))
    ]
    for names in (FOREIGN_NAMES, {"": USUAL}, _LAST_PARTS):
        for suffix in suffixes:
            for system, settings in names.items():
                setting = settings.get(suffix)
                if setting is not None and setting != path:
                    return ForeignName(system, setting)
    return None


def _records(parts: Sequence[str]) -> Iterator[str]:
    """The records that a key may be in, the innermost first."""
    for end in range(len(parts), 0, -1):
        yield ".".join((*parts[:end], "*"))


def _last_parts(settings: Mapping[str, str]) -> dict[str, str]:
    parts = {name.rpartition(".")[2] for name in settings if "." in name}
    meanings = {
        part: {s for name, s in settings.items() if name.rpartition(".")[2] == part}
        for part in parts
    }
    return {
        part: next(iter(found))
        for part, found in meanings.items()
        if len(found) == 1 and "_" in part
    }


_LAST_PARTS = {system: _last_parts(settings) for system, settings in FOREIGN_NAMES.items()}
