"""`data.prompt_template`: a prompt made from the columns of its row."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from streamrl.config.section import Section


class MessageTemplate(Section):
    """One chat message of a prompt."""

    role: str
    """Such as system or user."""
    content: str
    """Jinja, with the columns of the row."""


def _form(value: Any) -> str:
    return "List" if isinstance(value, list | tuple) else "Text"


PromptTemplate = Annotated[
    Annotated[str, Tag("Text")] | Annotated[tuple[MessageTemplate, ...], Tag("List")],
    Discriminator(_form),
]
