"""The configuration reference as Markdown, read from the pydantic models.

Invariant: every field of every section stands in it once, with its type, default, range and
meaning; a section that several settings share, such as a loss's own record, has its own heading.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_HEADER = "| setting | type | default | range | meaning |\n|---|---|---|---|---|\n"
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


def sections(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """One Markdown section for the model, then those of the models in its fields, in order."""
    if path:
        yield _section(model, path)
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        nested = list(_models(field.annotation))
        for inner in nested:
            yield from sections(inner, _path_of(here, inner, nested, field))


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The dotted name of every setting that is a value and not a section."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        nested = list(_models(field.annotation))
        if not nested:
            yield here
        for inner in nested:
            yield from settings(inner, _path_of(here, inner, nested, field))


def _section(model: type[BaseModel], path: str) -> str:
    depth = min(4, path.replace("[]", "").count(".") + 2)
    summary = " ".join((model.__doc__ or "").split())
    rows = "".join(_row(path, name, field) for name, field in model.model_fields.items())
    paragraphs = [f"{'#' * depth} `{path}`", *([summary] if summary else []), _HEADER + rows]
    return "\n\n".join(paragraphs)


def _row(path: str, name: str, field: FieldInfo) -> str:
    nested = list(_models(field.annotation))
    meaning = _cell(field.description or "")
    if nested and not meaning:
        meaning = _cell((nested[0].__doc__ or "").split("\n\n")[0]) or "A section of its own."
    cells = (
        f"`{name}`",
        " or ".join(dict.fromkeys(_types(field.annotation))),
        _default(field),
        ", ".join(dict.fromkeys(_ranges(field.annotation, tuple(field.metadata)))),
        meaning,
    )
    return f"| {' | '.join(cells)} |\n"


def _path_of(path: str, inner: type[BaseModel], nested: list[Any], field: FieldInfo) -> str:
    """Where the settings of `inner` stand: those of a tagged union are told apart by the tag."""
    if len(nested) == 1:
        return f"{path}[]" if get_origin(field.annotation) is tuple else path
    tag = field.discriminator if isinstance(field.discriminator, str) else None
    names = (get_args(inner.model_fields[tag].annotation) if tag else ()) or (inner.__name__,)
    return f"{path} ({', '.join(map(str, names))})"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections in an annotation, in order, inside unions, tuples and `Annotated` too."""
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
    elif origin is dict:
        yield "record"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    else:
        yield _NAMES[annotation]


def _ranges(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    for item in (*metadata, *getattr(annotation, "__metadata__", ())):
        if type(item) in _BOUNDS:
            attribute, sign = _BOUNDS[type(item)]
            yield f"{sign} {getattr(item, attribute):g}"
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
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        value = list(value)
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("...\n")
    return f"`{_cell(shown)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
