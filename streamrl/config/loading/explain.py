"""The sentence about a refused setting: the field, its value, and what is allowed. If the setting
exists elsewhere, it says where: `learner.lr` is at `learner.optimizer.lr`. For a path that does not
exist, it says what was probably meant."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from streamrl.config.loading.foreign_names import (
    IMPORTED,
    SYSTEMS,
    find_foreign_name,
    guess_foreign_name,
    is_foreign_section,
)
from streamrl.config.loading.foreign_names.values import answer, meant
from streamrl.config.section import SomeOf, leaves
from streamrl.errors import ConfigError, did_you_mean, nearest

RESOLVED_FILE = "config.yaml"
"""The file of a run's configuration, in the run folder."""
_MAX_PLACES = 3
_A_FILE_OF_NAMES = 3
_OF_KEYS = ("extra_forbidden", "misplaced", "missing", "unknown_key")
"""Kinds of errors about a key, which is the last part of their location."""


def similar_file(path: Path) -> str:
    """The configuration with a similar name beside the path or in configs/; "" if there is none."""
    return _similar(path.stem, {file.stem: file for file in _glob("configs", path, "*.yaml")})


def similar_run(folder: Path) -> str:
    """The run with a similar name beside the folder or in runs/; "" if there is none."""
    files = _glob("runs", folder, f"*/{RESOLVED_FILE}")
    return _similar(folder.name, {file.parent.name: file.parent for file in files})


def other_runs(folder: Path) -> str:
    """What to name instead of a folder that holds no run, or how to start a run."""
    if similar := similar_run(folder):
        return similar
    files = set(_glob("runs", folder, f"*/{RESOLVED_FILE}"))
    newest = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[:_MAX_PLACES]
    if newest:
        return f"; the newest runs are {', '.join(str(file.parent) for file in newest)}"
    return "; `streamrl launch CONFIG` starts a run, by default in runs/NAME"


def _glob(usual: str, path: Path, pattern: str) -> list[Path]:
    return [file for folder in (Path(usual), path.parent) for file in folder.glob(pattern)]


def _similar(name: str, paths: dict[str, Path]) -> str:
    close = nearest(name, paths)
    return "" if close is None else f"; did you mean '{paths[close]}'?"


# Without their section these could be anything.
_GENERIC = frozenset({"name", "path", "kind", "mode", "level", "coef", "every", "url", "method"})


def sections_at(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes that a field may hold, also inside `X | None` or as the settings of a
    choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        yield from (record for one in annotation.__subclasses__() for record in sections_at(one))
    for argument in getattr(annotation, "__args__", ()):
        yield from sections_at(argument)


@cache
def all_paths(model: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted name below the model, including sections, each once."""
    paths: dict[str, None] = {}
    for name, field in model.model_fields.items():
        paths[name] = None
        for section in sections_at(field.annotation):
            paths |= dict.fromkeys(f"{name}.{path}" for path in all_paths(section))
    return tuple(paths)


def own_places(model: type[BaseModel], path: str) -> tuple[str, ...]:
    """Where the setting stands that was probably meant; () if nowhere or in too many places.

    Those that end as `path` does, with as many of its parts as there are; of these the ones in its
    own section, if it is one of ours.

    >>> from streamrl.config import RunConfig
    >>> own_places(RunConfig, "learner.lr")
    ('learner.optimizer.lr', 'learner.optimizer.groups.lr')
    >>> own_places(RunConfig, "learner.temperature")
    ('generator.temperature', 'validation.temperature')
    """
    parts = path.split(".")
    for start in range(len(parts)):
        suffix = ".".join(parts[start:])
        found = [p for p in all_paths(model) if p.endswith(f".{suffix}") and p != path]
        near = [p for p in found if p.startswith(f"{parts[0]}.")]
        is_clear = bool(near) or suffix not in _GENERIC
        if found and is_clear:
            places = tuple(near or found)
            return places if len(places) <= _MAX_PLACES else ()
    return ()


def close_places(model: type[BaseModel], key: str) -> tuple[str, ...]:
    """Where a setting with a similar name is, for a key outside any section."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(all_paths(model)) if "." in path}
    close = nearest(key, leaves, 0.8)
    return () if close is None else (leaves[close],)


def explain(
    error: ValidationError, model: type[BaseModel], origins: Mapping[str, str] | None = None
) -> ConfigError:
    """The validation error as sentences: the field, its value, what is allowed, where it was
    set."""
    return ConfigError("\n".join(_sentences(error, model, origins or {})))


def _sentences(
    error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]
) -> Iterator[str]:
    # A list that must not be empty counts as empty where what is in it is refused.
    details = [
        d for d in error.errors(include_url=False) if d["type"] != "too_short" or not d["input"]
    ]
    system, num_names = _system_of(details)
    for path, same in groupby(details, lambda detail: _path(detail["loc"], detail["type"], model)):
        detail = _joined(same)
        for field, sentence in _findings(detail, list(path), model, system):
            # One that is not given itself is refused for another of its section.
            near = (key for name in (field, ".".join(path)) for key in origins if is_at(key, name))
            key = field if field in origins else next(near, "")
            place = f" ({origins[key]})" if key else ""
            told = f"{sentence}{_hint(field, detail)}{place}"
            yield f"{field}: {told}" if field else told
    if num_names >= _A_FILE_OF_NAMES and system in IMPORTED:
        command = f"streamrl import FILE --from {system.lower()}"
        yield f"{num_names} of these are names of {system}: `{command}` translates its files"


def _system_of(details: Iterable[ErrorDetails]) -> tuple[str, int]:
    """The other system that has most of the refused keys, and how many of them."""
    keys = [
        key
        for detail in details
        if detail["type"] in ("extra_forbidden", "unknown_key")
        for key, _ in leaves(detail["input"], ".".join(map(str, detail["loc"])))
    ]
    counts = {s: sum(find_foreign_name(key, s) is not None for key in keys) for s in SYSTEMS}
    system = max(SYSTEMS, key=counts.__getitem__)
    return system, counts[system]


def _path(loc: tuple[int | str, ...], kind: str, model: type[BaseModel]) -> tuple[str, ...]:
    """The keys that lead to the refused value, without the names of union types that pydantic
    inserts, such as "constrained-int"."""
    path: list[str] = []
    at: Any = model
    for number, part in enumerate(loc, start=1):
        if (field := _field(at, part)) is not None:
            at = _held(field)
        elif isinstance(part, str) and get_origin(at) not in (dict, Mapping):
            is_key = number == len(loc) and kind in _OF_KEYS
            if not is_key:
                continue
        path.append(str(part))
    return tuple(path)


def _joined(details: Iterable[ErrorDetails]) -> ErrorDetails:
    """The refusals of all types of a union as one."""
    alike = [*details]
    first, *others = map(_in_yaml, alike)
    allowed = (message.removeprefix("input should be ") for message in others)
    return {**alike[0], "msg": ", or ".join((first, *allowed))}


_YAML_TYPES = {"tuple_type": "list", "dict_type": "mapping", "path_type": "path"}


def _in_yaml(detail: ErrorDetails) -> str:
    """pydantic's message, in terms of YAML types."""
    if kind := _YAML_TYPES.get(detail["type"]):
        return f"input should be a {kind}"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    message = detail["msg"].partition(", unable to")[0].replace("Tuple", "List")
    return message[:1].lower() + message[1:]


def _hint(field: str, detail: ErrorDetails) -> str:
    """What was probably meant by a refused value of an existing setting."""
    value = detail["input"]
    if isinstance(value, str) and "${" in value:
        return "; nothing is filled in for ${...}: write the value, or repeat it by a YAML anchor"
    if detail["type"] == "string_type" and isinstance(value, int | float):
        return "; in quotes of YAML it is one, in a shell within others: '\"...\"'"
    is_plain = isinstance(value, str | int | float) and detail["type"] != "extra_forbidden"
    return f"; {hint}" if is_plain and (hint := meant(field, value)) else ""


def _findings(
    detail: ErrorDetails, path: list[str], model: type[BaseModel], system: str
) -> Iterator[tuple[str, str]]:
    """Pairs (field, sentence); several if a section is refused key by key."""
    field, was, message = ".".join(path), _shown(detail["input"]), detail["msg"]
    match detail["type"]:
        case "extra_forbidden" if field in all_paths(model):
            nested = f"{': {'.join(field.split('.'))}: ...{'}' * field.count('.')}"
            yield field, f"unknown key; a file has it section by section: {nested}"
        case "extra_forbidden":
            names = _fields_at(model, path[:-1])
            hint = did_you_mean(path[-1], names) if names else "none of this section"
            is_misspelled = hint.startswith("did you mean") and not is_foreign_section(path[-1])
            is_section_of_ours = is_misspelled and isinstance(detail["input"], Mapping)
            elsewhere = (
                [] if is_section_of_ours else _elsewhere(field, detail["input"], model, system)
            )
            yield from elsewhere or [(field, f"unknown key; {hint}")]
        case "unknown_key":
            yield from _elsewhere(field, detail["input"], model, system) or [(field, message)]
        case "model_type" | "model_attributes_type":
            keys = (f"{field}.{name}" for name in _fields_at(model, path)[:4])
            yield field, f"was {was}; it is a section, with keys such as {', '.join(keys)}"
        case "misplaced":
            yield field, message
        case "missing":
            yield field, "is required and was not given"
        case "value_error":
            own, _, sentence = message.partition(": ")
            if path and own in _fields_at(model, path):
                own = f"{field}.{own}"
            yield (own, sentence) if own.startswith(f"{field}.") else (field, message)
        case _:
            yield field or "configuration", f"was {was}; {message}"


def _elsewhere(
    field: str, value: object, model: type[BaseModel], system: str
) -> list[tuple[str, str]]:
    """The name here of a refused key, or of each key below it; empty if there is none."""
    sentences = {leaf: _renamed(leaf, item, model, system) for leaf, item in leaves(value, field)}
    if not any(sentences.values()):
        return []
    return [(leaf, sentence or "unknown key") for leaf, sentence in sentences.items()]


def _renamed(field: str, value: object, model: type[BaseModel], system: str) -> str:
    """The sentence for a key that has another name or place here; "" if none is known."""
    if name := find_foreign_name(field, first=system):
        return name.sentence(answer(name, value))
    places = own_places(model, field)
    end = ".".join(("", *field.split(".")[-2:]))
    is_alike = any(place.endswith(end) for place in places)
    if not is_alike and (name := guess_foreign_name(field)):
        return name.sentence(by_last_part=True)
    places = places or (() if "." in field else close_places(model, field))
    return f"unknown key; did you mean {' or '.join(places)}?" if places else ""


def is_at(key: str, field: str) -> bool:
    """Whether one path equals the other or contains it."""
    return key == field or key.startswith(field + ".") or field.startswith(key + ".")


def _field(at: Any, part: int | str) -> FieldInfo | None:
    """The field of this name in the sections that are possible there."""
    sections = (section.model_fields for section in sections_at(at))
    return next((fields[part] for fields in sections if part in fields), None)


def _held(field: FieldInfo) -> Any:
    """The annotation of the value at the path."""
    of = (mark.section for mark in field.metadata if isinstance(mark, SomeOf))
    return next(of, field.annotation)


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names that are possible below `path`."""
    at: Any = model
    for part in path:
        if not part.isdecimal():
            field = _field(at, part)
            at = None if field is None else _held(field)
    return next((list(section.model_fields) for section in sections_at(at)), [])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
