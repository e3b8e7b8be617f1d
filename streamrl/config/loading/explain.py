"""The one sentence that a refused setting gets: the field, what it was, and what is allowed."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

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
        path = [part for part in detail["loc"] if not _is_union_branch(part)]
        field = ".".join(str(part) for part in path) or "configuration"
        origin = next((f" ({o})" for key, o in origins.items() if _is_at(key, field)), "")
        yield _sentence(detail, path, field, model) + origin


def _sentence(
    detail: "ErrorDetails", path: list[int | str], field: str, model: type[BaseModel]
) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return (
                f"{field}: unknown key; {did_you_mean(str(path[-1]), _fields_at(model, path[:-1]))}"
            )
        case "missing":
            return f"{field}: is required and was not given"
        case "unknown_key":
            return f"{field}: {detail['msg']}"
        case "value_error":
            sentence = detail["msg"].removeprefix("Value error, ")
            return f"{field}: {sentence}" if path else sentence
        case _:
            return f"{field}: was {_shown(detail['input'])}; {_lower(detail['msg'])}"


def _is_at(key: str, field: str) -> bool:
    return key == field or key.startswith(field + ".") or field.startswith(key + ".")


def _fields_at(model: type[BaseModel], path: list[int | str]) -> list[str]:
    """Names that may stand below `path`; walks nested sections, also inside `X | None`."""
    for part in path:
        field = model.model_fields.get(str(part))
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
