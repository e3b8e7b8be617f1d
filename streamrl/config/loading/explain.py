"""The one sentence that a refused setting gets: the field, what it was, and what is allowed."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from streamrl.config.loading.foreign_names import FOREIGN_SECTIONS, find_foreign_name
from streamrl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def explain(
    error: ValidationError, model: type[BaseModel], origins: Mapping[str, str] | None = None
) -> ConfigError:
    """The validation error as sentences: field, what it was, what is allowed, where it stands."""
    return ConfigError("\n".join(_sentences(error, model, origins or {})))


def _sentences(
    error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]
) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        path = [str(part) for part in detail["loc"] if not _is_union_branch(part)]
        for field, sentence in _findings(detail, path, model):
            origin = next((f" ({o})" for key, o in origins.items() if _is_at(key, field)), "")
            yield f"{field}: {sentence}{origin}" if field else f"{sentence}{origin}"


def _findings(
    detail: "ErrorDetails", path: list[str], model: type[BaseModel]
) -> Iterator[tuple[str, str]]:
    """(field, sentence); several where a whole section is refused key by key."""
    field = ".".join(path)
    match detail["type"]:
        case "extra_forbidden":
            hint = did_you_mean(path[-1], _fields_at(model, path[:-1]))
            is_misspelled = hint.startswith("did you mean") and path[-1] not in FOREIGN_SECTIONS
            is_section_of_ours = is_misspelled and isinstance(detail["input"], Mapping)
            foreign = [] if is_section_of_ours else _foreign(field, detail["input"])
            yield from foreign or [(field, f"unknown key; {hint}")]
        case "unknown_key":
            yield from _foreign(field, detail["input"]) or [(field, detail["msg"])]
        case "missing":
            yield field, "is required and was not given"
        case "value_error":
            yield field, detail["msg"].removeprefix("Value error, ")
        case _:
            sentence = f"was {_shown(detail['input'])}; {_lower(detail['msg'])}"
            yield field or "configuration", sentence


def _foreign(field: str, value: object) -> list[tuple[str, str]]:
    """What a refused key, or each key below it, is called here; empty if nobody has such names."""
    leaves = list(_leaves(field, value))
    names = [find_foreign_name(leaf) for leaf in leaves]
    if not any(names):
        return []
    return [
        (leaf, name.sentence if name else "unknown key")
        for leaf, name in zip(leaves, names, strict=True)
    ]


def _leaves(path: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path


def _is_at(key: str, field: str) -> bool:
    return key == field or key.startswith(field + ".") or field.startswith(key + ".")


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names that may stand below `path`; walks nested sections, also inside `X | None`."""
    for part in path:
        field = model.model_fields.get(part)
        nested = field and next(_models_in(field.annotation), None)
        if not nested:
            return []
        model = nested
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _is_union_branch(part: int | str) -> bool:
    """Pydantic puts the tried class of a union into the path, such as "MakeModelSection"."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
