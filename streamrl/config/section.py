"""The base class of configuration sections, and the ranges and choices that many settings share.

Invariant: a section is frozen and refuses unknown keys.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from streamrl.types.ranges import MAX_VERSION


class Section(BaseModel):
    """A frozen record of settings; unknown keys are refused."""

    short_for: ClassVar[str] = ""
    """The field that a plain string in place of the section sets, if that is allowed."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _may_be_short(cls, value: Any) -> Any:
        return {cls.short_for: value} if cls.short_for and isinstance(value, str) else value

    @field_validator("*", mode="wrap")
    @classmethod
    def _keeps_truth_values(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """pydantic reads true as 1 where a number is expected."""
        made = validate(value)
        if _became_number(value, made):
            raise ValueError(f"was {shown(value)}; true and false are no numbers")
        return made

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between settings of this section; the first is
        shown. Sentences may be broken into lines."""
        return iter(())

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if sentence := next(self.contradictions(), None):
            raise ValueError(unfolded(sentence))
        return self

    def not_default(self, names: Iterable[str]) -> list[str]:
        """Those of the fields whose value is not the default."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

    def with_values(self, **values: Any) -> Self:
        """A copy with other values, which are not checked; for a section, a mapping of the values
        to change."""
        sections = {
            name: section.with_values(**value)
            for name, value in values.items()
            if isinstance(section := getattr(self, name), Section) and isinstance(value, Mapping)
        }
        return self.model_copy(update={**values, **sections})


AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class SomeOf:
    """Marks a mapping whose keys are settings of a section."""

    section: type[Section]


def some_of(
    section: type[AnySection],
    values: Mapping[str, Any],
    place: tuple[int | str, ...],
    given: Mapping[str, Any],
    not_there: Mapping[str, str],
) -> AnySection:
    """The section with these values, where `given` are overrides from another place.

    Args:
        not_there: settings that may not be given there, each with the reason.

    Raises:
        ValidationError: an override is refused.
    """
    misplaced = {k: PydanticCustomError("misplaced", not_there[k]) for k in given if k in not_there}
    refused = [
        InitErrorDetails(type=why, loc=(*place, key), input=given[key])
        for key, why in misplaced.items()
    ]
    try:
        made = section.model_validate({k: v for k, v in values.items() if k not in misplaced})
    except ValidationError as error:
        refused += [
            InitErrorDetails(
                type=detail["type"],
                loc=(*place, *detail["loc"]),
                input=detail["input"],
                ctx=detail.get("ctx", {}),
            )
            for detail in error.errors()
        ]
    if refused:
        raise ValidationError.from_exception_data("RunConfig", refused)
    return made


def _became_number(given: Any, made: Any) -> bool:
    """Whether a truth value, or one in a list or mapping, was read as a number."""
    match given, made:
        case bool(), int() | float():
            return not isinstance(made, bool)
        case ((list() | tuple()), (list() | tuple())):
            return any(map(_became_number, given, made))
        case Mapping(), Mapping():
            return any(_became_number(item, made.get(key)) for key, item in given.items())
    return False


def twice(names: Iterable[str]) -> str | None:
    """The first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def refuse_unless(is_allowed: Callable[[Any], object], demand: str) -> AfterValidator:
    """A validator that refuses other values, with this demand."""

    def check(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(f"was {shown(value)}; {demand}")
        return value

    return AfterValidator(check)


def unfolded(text: str) -> str:
    """Join a sentence that the code has broken into lines; spaces within values stay."""
    return re.sub(r"\n\s+", " ", text)


def shown(value: object) -> str:
    """The value as written in a sentence."""
    if isinstance(value, float):
        return f"{value:g}"
    return repr(str(value) if isinstance(value, Path) else value)


def at_most(most: int) -> AfterValidator:
    """Bound of numbers that are sent between processes, whose messages hold no larger ones."""
    return refuse_unless(lambda number: number <= most, f"it must be at most {most}")


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Versions = Annotated[NotNegative, at_most(MAX_VERSION)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegativeNumber = Annotated[float, Field(ge=0)]
Seconds = PositiveNumber
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean; with 1 it would never change."""
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""A share that must not be 0."""
Dtype = Literal["float32", "bfloat16", "float16"]


# AdamW moves every weight by about the learning rate at each step, and weights are smaller than 1.
LearningRate = Share
LearningRateOrZero = Probability

Device = Annotated[
    str,
    refuse_unless(
        re.compile(r"auto|cpu|(cuda|xpu|mps)(:\d+)?").fullmatch,
        "it must be auto, cpu, cuda, cuda:0 (1, ...), mps or xpu",
    ),
]
"""A device as torch names it, or auto."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values by dotted name; an empty section or a list is one value."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def overlaid(below: Any, above: Any) -> Any:
    """The settings of both, section by section; those of `above` win."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: overlaid(below.get(key), item) for key, item in above.items()}}
