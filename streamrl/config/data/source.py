"""`data.source` and `data.eval_source`: one source of prompts, or several."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from streamrl.config.data.template import PromptTemplate
from streamrl.config.section import Section

_WEIGHT = Annotated[float, Field(gt=0, le=1e6)]


class SourceSettings(Section):
    """One of several sources of prompts. A string is short for a record with `path` alone."""

    path: str
    """What `data.source` names as a string."""
    weight: _WEIGHT | None = None
    """Share of the prompts, in proportion to the other weights. If none has a weight, the rows of
    all are one file; if some have, the others weigh 1."""
    name: str = ""
    """Put into the column `data.data_source_key` of each row. Empty: the column as it is, or the
    file's name without its suffix where the source has no such column."""
    subset: str | None = None
    """Configuration of a data set of the hub."""
    split: str | None = None
    """Split of a data set of the hub, or of a folder that has several."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """As `data.source_kwargs`, for this source."""
    prompt_key: str | None = None
    """As `data.prompt_key`, which null takes."""
    answer_key: str | None = None
    """As `data.answer_key`, which null takes."""
    prompt_template: PromptTemplate | None = None
    """As `data.prompt_template`, which null takes."""


def _form(value: Any) -> str:
    return "List" if isinstance(value, list | tuple) else "Text"


def _as_list(value: Any) -> Any:
    """One record is a list of one; a text in a list is a record."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError("is an empty list; name at least one source")
    return [{"path": entry} if isinstance(entry, str) else entry for entry in value]


Sources = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[SourceSettings, ...], Tag("List")],
    Discriminator(_form),
    BeforeValidator(_as_list),
]
