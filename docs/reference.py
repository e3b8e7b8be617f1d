"""The configuration reference as Markdown, read from the pydantic models.

Invariant: the reference has every field of every section, with its default, the allowed values and
its meaning. The fields of a section in two places are at the first, which the second names. If
another setting chooses a section's record, as for `loss_config`, the section is followed by what
each record adds. A field that is a section has a row only if it has a docstring; else, only a
heading.
"""

import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS, AdvantageSettings
from streamrl.config.algorithm.losses import LOSS_SETTINGS, LossSettings

_TITLES, _RULE = "| setting | default | meaning |\n", "|---|---|---|\n"
_RECORDS: Mapping[type[BaseModel], Mapping[str, type[BaseModel]]] = {
    AdvantageSettings: ADVANTAGE_SETTINGS,
    LossSettings: LOSS_SETTINGS,
}
_BOUNDS = {
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Ge: ("ge", "≥"),
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "≤"),
}
_NAMES: dict[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "integer",
    float: "number",
    Path: "path",
    Any: "anything",
    type(None): "null",
}


def sections(model: type[BaseModel]) -> Iterator[str]:
    """Yield a Markdown section for each model in the fields, each before those in its own."""
    yield from _sections(model, "", {})


def _sections(
    model: type[BaseModel], path: str, written: dict[type[BaseModel], str]
) -> Iterator[str]:
    if model in written:
        yield f"{_heading(path)}\n\nAs [`{written[model]}`](#{_anchor(written[model])}).\n"
        return
    if path:
        written[model] = path
        yield _section(model, path, dict(model.model_fields))
    if model in _RECORDS:
        yield _choices(model)
    for here, inner in _nested(model, path):
        yield from _sections(inner, here, written)


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the dotted name of every setting that is a value and not a section."""
    for name, field in model.model_fields.items():
        if not list(_models(field.annotation)):
            yield f"{path}.{name}" if path else name
    for here, inner in _nested(model, path):
        yield from settings(inner, here)


def _nested(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        suffix = "[]" if _is_list(field.annotation) else ""
        for inner in _models(field.annotation):
            yield here + suffix, inner


def _is_list(annotation: Any) -> bool:
    """Whether the annotation's sections are in a list, which may be one form of several."""
    if get_origin(annotation) is tuple:
        return any(_models(annotation))
    return any(map(_is_list, get_args(annotation)))


def _choices(model: type[BaseModel]) -> str:
    """Return what each record that another setting may choose adds to a section; equal rows are
    joined."""
    names: dict[type[BaseModel], list[str]] = {}
    for name, record in _RECORDS[model].items():
        if record.model_fields.keys() - model.model_fields.keys():
            names.setdefault(record, []).append(name)
    rows: dict[str, list[str]] = {}
    for record, chosen in names.items():
        for name, field in record.model_fields.items():
            if name not in model.model_fields:
                rows.setdefault(_row(record, name, field), []).extend(chosen)
    said = "".join(f"- {_summary(record).strip()}\n" for record in names)
    table = "".join(f"| {', '.join(chosen)} {row}" for row, chosen in rows.items())
    return f"{said}\n| of {_TITLES}|---{_RULE}{table}"


def _section(model: type[BaseModel], path: str, fields: Mapping[str, FieldInfo]) -> str:
    summary = _summary(model)
    rows = "".join(
        _row(model, name, field)
        for name, field in fields.items()
        if name in _meanings(model) or not list(_models(field.annotation))
    )
    return "\n\n".join([_heading(path), *([summary] if summary else []), _TITLES + _RULE + rows])


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _heading(path: str) -> str:
    depth = min(4, path.replace("[]", "").count(".") + 2)
    return f"{'#' * depth} `{path}`"


def _anchor(path: str) -> str:
    """Return the anchor that Markdown makes for the heading."""
    return path.replace(".", "").replace("[]", "")


def _row(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    meaning = _cell(_meanings(model).get(name, ""))
    return f"| `{name}` | {_default(field)}{_values(field)} | {meaning} |\n"


@cache
def _meanings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings below the fields, by field name. Pydantic could read them when the
    models are imported, but that would double the time of the import."""
    inherited = [base for base in reversed(model.__bases__) if issubclass(base, BaseModel)]
    found = {name: text for base in inherited for name, text in _meanings(base).items()}
    if model is BaseModel:
        return found
    (section,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(section, ast.ClassDef)
    for field, below in itertools.pairwise(section.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


def _values(field: FieldInfo) -> str:
    """Return the allowed values in parentheses, except what the default shows by itself."""
    shown: dict[type, set[str]] = {
        bool: {"true or false"},
        int: {"integer"},
        float: {"number"},
        str: {"text"},
        type(None): {"null"},
    }
    said = shown.get(type(field.default), set())
    kinds = [kind for kind in dict.fromkeys(_types(field.annotation)) if kind not in said]
    ranges = dict.fromkeys(_ranges(field.annotation, tuple(field.metadata)))
    if kinds == ["null"]:
        kinds = ["or null"]
    values = ", ".join((*filter(None, [" or ".join(kinds)]), *ranges))
    return f" ({values})" if values else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections in an annotation, in order, also inside unions, tuples and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _types(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _types(arguments[0])
    elif origin is Literal:
        yield ", ".join(f"`{choice}`" for choice in arguments)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _types(argument)
    elif origin is tuple and arguments[-1] is not Ellipsis:
        yield f"[{', '.join(kind for argument in arguments for kind in _types(argument))}]"
    elif origin in (tuple, list):
        yield f"list of {' or '.join(_types(arguments[0]))}"
    elif origin in (dict, Mapping):
        yield "record"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    else:
        yield _NAMES[annotation]


def _ranges(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    for item in (*metadata, *getattr(annotation, "__metadata__", ())):
        if type(item) in _BOUNDS:
            attribute, sign = _BOUNDS[type(item)]
            yield f"{sign}{getattr(item, attribute):g}"
        elif isinstance(item, FieldInfo):
            yield from _ranges(None, tuple(item.metadata))
        elif pattern := getattr(item, "pattern", None):
            yield f"`{_cell(pattern)}`"
    for argument in get_args(annotation):
        yield from _ranges(argument)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        value = list(value)
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("...\n")
    return f"`{_cell(shown)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
