"""Settings that depend on a choice beside them: the record of the loss, of the advantage.

Invariant: the record is that of the choice, so a number that the choice does not read is refused.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from streamrl.config.section import Section
from streamrl.errors import did_you_mean
from streamrl.user_code import check_user_code, is_user_code

Record = TypeVar("Record", bound=Section)


def check_choice(
    name: str, known: Mapping[str, object], elsewhere: Mapping[str, str] | None = None
) -> str:
    """The name, if it is built in or has the form of a user's own.

    Args:
        elsewhere: what to set instead, for names that people give to this choice by mistake.

    Raises:
        ValueError: neither; pydantic makes it a refusal of the field.
    """
    if is_user_code(name):
        check_user_code(name)
    elif name not in known and name.lower() in (elsewhere or {}):
        raise ValueError(f"was {name!r}; {(elsewhere or {})[name.lower()]}")
    elif name not in known:
        raise ValueError(f"{name!r} is unknown; {did_you_mean(name, known)}")
    return name


def choose_record(
    kind: str, name: str, records: Mapping[str, type[Record]], own: type[Record], value: object
) -> Record:
    """The value as the record of the choice.

    Args:
        kind: what is chosen: loss or advantage.
        own: the record of a user's own, which keeps every key.
        value: a mapping of the file, or a record.

    Raises:
        ValidationError: a key that the record does not have, or a number out of range.
    """
    record = own if is_user_code(name) else records[name]
    if isinstance(value, Mapping) and record is not own:
        refusals = [
            _refusal(str(key), value[key], kind, name, records)
            for key in value
            if key not in record.model_fields
        ]
        if refusals:
            raise ValidationError.from_exception_data(record.__name__, refusals)
    return record.model_validate(value)


def _refusal(
    key: str, value: object, kind: str, name: str, records: Mapping[str, type[Record]]
) -> InitErrorDetails:
    allowed = records[name].model_fields
    owners = [other for other, record in records.items() if key in record.model_fields]
    known = f"{name} has {', '.join(allowed)}"
    if owners:
        hint = f"it belongs to {kind} {' and '.join(owners)} ({known})"
    elif close := get_close_matches(key, allowed, n=1):
        hint = f"did you mean {close[0]!r}? ({known})"
    else:
        hint = known
    context: dict[str, Any] = {"sentence": f"unknown key for {kind} {name}; {hint}"}
    return InitErrorDetails(
        type=PydanticCustomError("unknown_key", "{sentence}", context), loc=(key,), input=value
    )
