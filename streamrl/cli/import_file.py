"""`streamrl import`: makes a configuration from a file of verl, ROLL or TRL.

Invariant: the settings written do not contradict each other. A key without a counterpart, one whose
value has none, or one that is refused beside the others becomes a comment with the reason. What
remains to be done stands at the head. A computed setting, such as a batch size, is followed by its
computation. What the file leaves out is set if that system's default differs from ours.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Set
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from streamrl.cli.check.unused_settings import check_unused_settings
from streamrl.config.loading.explain import explain, is_at
from streamrl.config.loading.foreign_names import (
    IMPORTED,
    ForeignName,
    find_foreign_name,
    foreign_names,
)
from streamrl.config.loading.foreign_names.files import read_keys
from streamrl.config.loading.foreign_names.rewards import TO_BE_NAMED, names_a_reward, rewards_of
from streamrl.config.loading.foreign_names.values import (
    WITHOUT,
    Lookup,
    arithmetic,
    default_of,
    has_other_default,
    translate,
)
from streamrl.config.loading.load import with_setting
from streamrl.config.loading.rendering import rendered
from streamrl.config.loading.sources import Setting, dump
from streamrl.config.run_config import RunConfig
from streamrl.data_files import SUFFIXES
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, nearest
from streamrl.findings import Severity
from streamrl.user_code import is_user_code

SYSTEMS = {system.lower(): system for system in IMPORTED}
_NO_ROWS = "no held-out rows are named"
_BY_SOURCE = "verl's own, by data_source"
_SOURCES = ("data.source", "data.eval_source")
_TO_BE_GIVEN = "???"
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_SECRET = re.compile(r"(api_key|token|password|secret)$", re.IGNORECASE)


class Key(NamedTuple):
    """A key of the file, or one that it leaves out; `name` is None for an unknown key."""

    key: str
    value: Any
    name: ForeignName | None
    is_given: bool = True
    system: str = ""

    @property
    def origin(self) -> str:
        return self.key if self.is_given else f"{self.key}, a default"

    @property
    def is_set(self) -> bool:
        return self.value is not None or self.name is None

    def comment(self, reason: str) -> str:
        line = dump(self.value, default_flow_style=True, width=10**9).strip()
        value = "***" if _SECRET.search(self.key) else line.removesuffix("\n...")
        return f"# {self.origin}: {value}; {reason}"


Found = tuple[Key, dict[str, Any] | None]
"""A key with our settings for it, in our form; None if it has none."""


class Joined(NamedTuple):
    """Our settings, the key that each comes from, and the keys that leave a section out."""

    ours: dict[str, Any]
    of: dict[str, Key]
    left_out: dict[str, Key]


class Imported(NamedTuple):
    """The configuration as YAML, what remains to be done, and the keys that have no setting in it;
    `unknown` are those that the system does not have."""

    text: str
    to_do: list[str]
    left: list[str]
    unknown: list[str]


def main(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output) if arguments.output else None
    found = imported(Path(arguments.file), SYSTEMS[arguments.system])
    if output is None:
        print(found.text, end="")
    elif output.exists():
        raise ConfigError(f"--output: {output} exists already; name a new file")
    else:
        write_file(output, found.text)
    said = [f"wrote {output}"] if output else []
    where = " (comments at its end)" if found.left else ""
    said.append(f"keys without a counterpart, or with another form here: {len(found.left)}{where}")
    if found.unknown:
        said.append(f"keys that are not known: {', '.join(found.unknown)}")
    print("\n".join([*said, *found.to_do]), file=sys.stderr)
    return 0


def imported(path: Path, system: str) -> Imported:
    """Make the configuration; each setting is followed by the name that it had.

    Raises:
        ConfigError: the file cannot be read.
    """
    names = foreign_names(system)
    values, missing = read_keys(path, lambda name: default_of(names[name]))
    keys = _keys(values, system)
    given = {key.name.name: key.value for key in keys if key.name}
    used: set[str] = set()

    def lookup(name: str) -> Any:
        used.add(name)
        return given[name] if name in given else default_of(names[name])

    def shown(name: str) -> str:
        return f"{lookup(name)}" if name in values else f"{lookup(name)} (a default)"

    rewards, names_of_rewards = rewards_of(values, system, lookup)
    # The settings of all rewards belong to the first of their keys.
    own_of = {name: rewards if name == names_of_rewards[0] else {} for name in names_of_rewards}
    found = [(k, own_of[k.key] if k.key in own_of else _translated(k, lookup)) for k in keys]
    joined = _joined(found)
    ours, of = joined.ours, joined.of
    computed: dict[str, str] = {}
    for key, own in found:
        if own and key.name is not None:
            computed |= arithmetic(key.name, key.value, shown)
    refused: dict[str, str] = {}
    if "data.eval_source" not in ours:
        ours["run.evaluate"], of["run.evaluate"] = False, Key(_NO_ROWS, None, None)
        refused = {"validation.every": _NO_ROWS} if ours.pop("validation.every", 0) else {}
    more, problem = _without_refused(ours)
    refused |= more
    kept = {name: value for name, value in ours.items() if name not in refused}
    _with_rewards(kept, of, found, system)
    sentences = {n: "; ".join(filter(None, (computed.get(n), why))) for n, why in refused.items()}
    stands = used.union(names_of_rewards, (of[name].key for name in kept))
    told = [
        (key, reason)
        for key, own in found
        if key.is_given and key.is_set
        for reason in _reasons(key, own, joined, sentences, stands)
    ]
    head = [f"# From {path.name} of {system}; behind each setting, the name that it has there."]
    head += [f"# defaults: no file {name!r}; {system}'s own defaults stand" for name in missing]
    to_do = [f"data.reward: {line}" for line in _about_rewards(kept, of)]
    to_do += [f"To be mended: {line}" for line in problem.splitlines()]
    head += [f"# {line}" for line in to_do]
    origins = {name: computed.get(name, of[name].origin) for name in kept}
    tail = [key.comment(reason) for key, reason in told]
    tail = ["", "# What has no counterpart, or another form here:", *tail] if tail else []
    return Imported(
        "\n".join([*head, rendered(_tree(kept), origins).rstrip(), *tail, ""]),
        to_do,
        left=list(dict.fromkeys(key.key for key, _ in told)),
        unknown=[f"{key.key}{_meant(key)}" for key, _ in told if key.name is None],
    )


def _keys(values: Mapping[str, Any], system: str) -> list[Key]:
    """The keys in the order of the system's list of names, so a line may build on those above
    it."""
    names = foreign_names(system)
    given = [
        Key(key, value, find_foreign_name(key, system), system=system)
        for key, value in values.items()
    ]
    known = {key.name.name for key in given if key.name}
    others = [
        Key(name.name, default_of(name), name, is_given=False)
        for name in names.values()
        if has_other_default(name) and name.name not in known
    ]
    order = {name: number for number, name in enumerate(names)}
    return sorted([*given, *others], key=lambda key: order[key.name.name] if key.name else -1)


def _joined(found: list[Found]) -> Joined:
    joined = Joined({}, {}, {})
    for key, own in found:
        for setting, value in (own or {}).items():
            if setting == WITHOUT:
                joined.left_out[value] = key
            else:
                joined.of[setting], joined.ours[setting] = key, value
    for setting in [*joined.ours]:
        if any(f"{setting}.".startswith(f"{section}.") for section in joined.left_out):
            del joined.ours[setting]
    return joined


def _with_rewards(
    kept: dict[str, Any], of: dict[str, Key], found: list[Found], system: str
) -> None:
    """Set a reward if there is none yet: if the file names one, a placeholder to be named; for
    verl, which has a reward for each data source, mostly for mathematics, `math`."""
    if kept.keys() & {"data.reward", "data.rewards"}:
        return
    for key, own in found:
        if key.is_given and key.is_set and own != {} and key.name and names_a_reward(key.name):
            kept["data.reward"], of["data.reward"] = TO_BE_NAMED, key
            return
    if system == "verl":
        kept["data.reward"], of["data.reward"] = "math", Key(_BY_SOURCE, None, None)


def _about_rewards(kept: Mapping[str, Any], of: Mapping[str, Key]) -> list[str]:
    rewards = [e["reward"] for e in kept.get("data.rewards", [])] or [kept.get("data.reward")]
    if rewards == [None]:
        return ["exact_match, as no key names a reward"]
    if "data.reward" in kept and of["data.reward"].key == _BY_SOURCE:
        return [
            "math, as no key names a reward, and verl has one for each data_source; rows of code, "
            "tools or search need another (docs/rewards.md)"
        ]
    return [
        f"{reward} is to be there, a function of your own in verl's form, TRL's or ours "
        "(docs/extending/reward.md)"
        for reward in map(str, rewards)
        if is_user_code(reward) and not Path(reward.rpartition(":")[0]).is_file()
    ]


def _translated(key: Key, lookup: Lookup) -> dict[str, Any] | None:
    if key.name is None or "${" in str(key.value) or key.value == _TO_BE_GIVEN:
        return None
    try:
        ours = translate(key.name, key.value, lookup)
    except LookupError:
        return None
    if ours is None:
        return None
    formed = {setting: _in_our_form(setting, value) for setting, value in ours.items()}
    return {s: value for s, value in formed.items() if value is not None or s not in _SOURCES}


def _reasons(
    key: Key,
    own: Mapping[str, Any] | None,
    joined: Joined,
    refused: Mapping[str, str],
    stands: Set[str],
) -> list[str]:
    """Why settings of the key are refused, or why the result has none."""
    if sentences := [why for name, why in refused.items() if joined.of[name] is key]:
        return sentences
    if stands & {key.key, key.name.name if key.name else ""}:
        return []
    for setting in own or {}:
        if setting == WITHOUT:
            return [f"{(own or {})[WITHOUT]} is left out"]
        if joined.of[setting] is not key:
            return [f"here it is {setting}, which {joined.of[setting].origin} sets"]
        for section, other in joined.left_out.items():
            if f"{setting}.".startswith(f"{section}."):
                return [f"here it is {setting}, which {other.origin} leaves out"]
    return [_reason(key)]


def _reason(key: Key) -> str:
    if "${" in str(key.value):
        return "what ${...} stands for is not in the file"
    if key.value == _TO_BE_GIVEN:
        return "has no value there"
    if key.name is None:
        return f"no key that is known of {key.system}{_meant(key)}"
    here, note = key.name.here, key.name.note and f" ({key.name.note})"
    return f"{here.strip('()')}{note}" if here.startswith("(") else f"here it is {here}{note}"


def _meant(key: Key) -> str:
    name = nearest(key.key, (name for name in foreign_names(key.system) if "*" not in name))
    return f" (did you mean {name}?)" if name else ""


def _in_our_form(setting: str, value: Any) -> Any:
    """A value in our form: several paths of rows become records, a data set of the hub becomes
    datasets:NAME, and comma-separated names become a list."""
    match setting, value:
        case (("data.source" | "data.eval_source"), [{"split": _} as record]):
            return _data_set(setting, record)
        case (("data.source" | "data.eval_source"), [str(path)]):
            return path
        case (("data.source" | "data.eval_source"), [str(), *_]):
            return [{"path": path} for path in value]
        case "learner.lora.targets", str() if value != "all-linear":
            return [name.strip() for name in value.split(",")]
    return value


def _data_set(setting: str, record: dict[str, Any]) -> Any:
    """Our source for a path that may be a data set of the hub, a folder, or a file (which has no
    split)."""
    path = record["path"]
    if path is None:
        return None
    if path.endswith(SUFFIXES):
        return path if setting == "data.source" else None
    is_local = path.startswith((".", "/", "~")) or Path(path).exists()
    given = {name: value for name, value in record.items() if value is not None}
    return [given | {"path": path if is_local else f"datasets:{path}"}]


def _without_refused(settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The settings that are refused, each with the reason, and what is still wrong without them."""
    refused: dict[str, str] = {}
    problem = ""
    for _ in settings:
        problem = _problem({k: v for k, v in settings.items() if k not in refused})
        more: dict[str, str] = {}
        for line in problem.splitlines():
            about = (field[0] for field in _FIELD.finditer(line))
            near = ([n for n in settings if n not in refused and is_at(n, f)] for f in about)
            more |= dict.fromkeys(next(filter(None, near), []), line)
        if not more:
            break
        refused |= more
    return refused, problem


def _problem(settings: Mapping[str, Any]) -> str:
    """The error with which a run with these settings is refused; "" if it is not."""
    try:
        counted_later = {k: v for k, v in settings.items() if k != "run.total_epochs"}
        found = check_unused_settings(RunConfig.model_validate(_tree(counted_later)))
        return "\n".join(one.sentence for one in found if one.severity is Severity.PROBLEM)
    except ValidationError as error:
        return str(explain(error, RunConfig))
    except ConfigError as error:
        return str(error)


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as nested sections, in our order; a section comes before what is in it."""
    sections = list(RunConfig.model_fields)
    ordered = sorted(settings, key=lambda name: (sections.index(name.partition(".")[0]), name))
    pairs = (Setting((*name.split("."),), settings[name], name) for name in ordered)
    return reduce(with_setting, pairs, {})
