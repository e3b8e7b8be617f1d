"""`streamrl import`: a configuration from a file of verl, ROLL or TRL.

Invariant: what is written is no contradiction. A key that has no counterpart, of which the value
has none, or that is refused beside the others stands as a comment with the reason; what is still to
be done stands at the head. Behind a setting that is computed, as batches are, stands how. What the
file leaves out is set where that system's default is not ours.
"""

import argparse
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from streamrl.cli.check.settings import check_effects
from streamrl.config.loading.explain import explain
from streamrl.config.loading.foreign_names import ForeignName, find_foreign_name, foreign_names
from streamrl.config.loading.foreign_names.files import read_keys
from streamrl.config.loading.foreign_names.values import (
    WITHOUT,
    arithmetic,
    default_of,
    has_other_default,
    translate,
)
from streamrl.config.loading.load import with_setting
from streamrl.config.loading.rendering import rendered
from streamrl.config.loading.sources import Setting, dump
from streamrl.config.run_config import RunConfig
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.findings import Severity

SYSTEMS = {"verl": "verl", "roll": "ROLL", "trl": "TRL"}
_NO_ROWS = "no held-out rows are named"
_TO_BE_GIVEN = "???"
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_SECRET = re.compile(r"(api_key|token|password|secret)$", re.IGNORECASE)


class Key(NamedTuple):
    """One key of the file, or of what it leaves out; `name` is None for one that is not known."""

    key: str
    value: Any
    name: ForeignName | None
    is_given: bool = True

    @property
    def origin(self) -> str:
        return self.key if self.is_given else f"{self.key}, a default"

    def comment(self, reason: str) -> str:
        value = "***" if _SECRET.search(self.key) else _one_line(self.value)
        return f"# {self.origin}: {value}; {reason}"


def main(arguments: argparse.Namespace) -> int:
    text = imported(Path(arguments.file), SYSTEMS[arguments.system])
    if arguments.output is None:
        print(text, end="")
        return 0
    output = Path(arguments.output)
    if output.exists():
        raise ConfigError(f"--output: {output} exists already; name a new file")
    write_file(output, text)
    return 0


def imported(path: Path, system: str) -> str:
    """The configuration as YAML; behind each setting, the name that it had.

    Raises:
        ConfigError: the file cannot be read.
    """
    names = foreign_names(system)
    values, missing = read_keys(path, lambda name: default_of(names[name]))
    keys = _keys(values, system)
    given = {key.name.name: key.value for key in keys if key.name}
    settings: dict[str, Key] = {}
    ours: dict[str, Any] = {}
    comments: list[str] = []
    left_out: list[str] = []

    def lookup(name: str) -> Any:
        return given[name] if name in given else default_of(names[name])

    def shown(name: str) -> str:
        return f"{lookup(name)}" if name in values else f"{lookup(name)} (a default)"

    computed: dict[str, str] = {}
    for key in keys:
        found = _translated(key, lookup)
        if found is None and key.is_given and not (key.value is None and key.name):
            comments.append(key.comment(_reason(key, system)))
        if found and key.name is not None:
            computed |= arithmetic(key.name, key.value, shown)
        for setting, value in (found or {}).items():
            if setting == WITHOUT:
                left_out.append(value)
            else:
                settings[setting], ours[setting] = key, _in_our_form(setting, value)
    ours = {
        name: value
        for name, value in ours.items()
        if not any(f"{name}.".startswith(f"{section}.") for section in left_out)
    }
    if "data.eval_source" not in ours:
        ours["run.evaluate"], settings["run.evaluate"] = False, Key(_NO_ROWS, None, None)
        if ours.pop("validation.every", 0) and settings["validation.every"].is_given:
            comments.append(settings["validation.every"].comment(_NO_ROWS))
    refused, problem = _without_refused(ours)
    comments += [
        settings[name].comment("; ".join(filter(None, (computed.get(name), why))))
        for name, why in refused.items()
        if settings[name].is_given
    ]
    kept = {name: value for name, value in ours.items() if name not in refused}
    head = [f"# From {path.name} of {system}; behind each setting, the name that it has there."]
    head += [f"# defaults: no file {name!r}; {system}'s own defaults stand" for name in missing]
    head += ["# data.reward: exact_match, as no key names a reward"] * ("data.reward" not in kept)
    head += [f"# To be mended: {line}" for line in problem.splitlines()]
    origins = {name: computed.get(name, settings[name].origin) for name in kept}
    tail = ["", "# What has no counterpart, or another form here:", *comments] if comments else []
    return "\n".join([*head, rendered(_tree(kept), origins).rstrip(), *tail, ""])


def _keys(values: Mapping[str, Any], system: str) -> list[Key]:
    """In the order of the names' lines, so a line may build on those above it."""
    names = foreign_names(system)
    given = [Key(key, value, find_foreign_name(key, system)) for key, value in values.items()]
    known = {key.name.name for key in given if key.name}
    others = [
        Key(name.name, default_of(name), name, is_given=False)
        for name in names.values()
        if has_other_default(name) and name.name not in known
    ]
    order = {name: number for number, name in enumerate(names)}
    return sorted([*given, *others], key=lambda key: order[key.name.name] if key.name else -1)


def _translated(key: Key, lookup: Any) -> dict[str, Any] | None:
    if key.name is None or "${" in str(key.value) or key.value == _TO_BE_GIVEN:
        return None
    try:
        return translate(key.name, key.value, lookup)
    except LookupError:
        return None


def _reason(key: Key, system: str) -> str:
    if "${" in str(key.value):
        return "what ${...} stands for is not in the file"
    if key.value == _TO_BE_GIVEN:
        return "has no value there"
    if key.name is None:
        return f"no key that is known of {system}"
    here, note = key.name.here, key.name.note and f" ({key.name.note})"
    return f"{here.strip('()')}{note}" if here.startswith("(") else f"here it is {here}{note}"


def _in_our_form(setting: str, value: Any) -> Any:
    """Several paths of rows are records here, and names that a comma parts are a list."""
    match setting, value:
        case (("data.source" | "data.eval_source"), [str(path)]):
            return path
        case (("data.source" | "data.eval_source"), [str(), *_]):
            return [{"path": path} for path in value]
        case "learner.lora.targets", str() if value != "all-linear":
            return [name.strip() for name in value.split(",")]
    return value


def _without_refused(settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The settings that are refused, each with the sentence, and what is wrong still without
    them."""
    refused: dict[str, str] = {}
    problem = ""
    for _ in settings:
        problem = _problem({k: v for k, v in settings.items() if k not in refused})
        more: dict[str, str] = {}
        for line in problem.splitlines():
            about = (field[0] for field in _FIELD.finditer(line))
            near = ([n for n in settings if n not in refused and _is_at(n, f)] for f in about)
            more |= dict.fromkeys(next(filter(None, near), []), line)
        if not more:
            break
        refused |= more
    return refused, problem


def _is_at(name: str, field: str) -> bool:
    return f"{name}.".startswith(f"{field}.") or f"{field}.".startswith(f"{name}.")


def _problem(settings: Mapping[str, Any]) -> str:
    """What a run with these settings is refused with; "" if it is not."""
    try:
        counted_later = {k: v for k, v in settings.items() if k != "run.total_epochs"}
        effects = check_effects(RunConfig.model_validate(_tree(counted_later)))
        return "\n".join(found.sentence for found in effects if found.severity is Severity.PROBLEM)
    except ValidationError as error:
        return str(explain(error, RunConfig))
    except ConfigError as error:
        return str(error)


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section, in our order; a section before what is in it."""
    sections = list(RunConfig.model_fields)
    ordered = sorted(settings, key=lambda name: (sections.index(name.partition(".")[0]), name))
    pairs = (Setting((*name.split("."),), settings[name], name) for name in ordered)
    return reduce(with_setting, pairs, {})


def _one_line(value: Any) -> str:
    return dump(value, default_flow_style=True, width=10**9).strip().removesuffix("\n...")
