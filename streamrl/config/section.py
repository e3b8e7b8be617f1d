"""The base of every configuration section, and the one sentence a refused configuration gets.

Invariant: a section is frozen, knows every key it accepts, and says of a wrong one which field it
is, what it was, and what is allowed. Used by all of `streamrl.config`; nothing here reads files.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from streamrl.errors import ConfigError, did_you_mean


class Section(BaseModel):
    """A frozen record of settings; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def explain(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The validation error as sentences: field, what it was, what is allowed."""
    return ConfigError("\n".join(_sentences(error, model)))


def _sentences(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        path = [part for part in detail["loc"] if not _is_union_branch(part)]
        field = ".".join(str(part) for part in path) or "configuration"
        match detail["type"]:
            case "extra_forbidden":
                siblings = _fields_at(model, path[:-1])
                yield f"{field}: unknown key; {did_you_mean(str(path[-1]), siblings)}"
            case "missing":
                yield f"{field}: is required and was not given"
            case "value_error":
                sentence = detail["msg"].removeprefix("Value error, ")
                yield sentence if not path else f"{field}: {sentence}"
            case _:
                yield f"{field}: was {_shown(detail['input'])}; {_lower(detail['msg'])}"


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
