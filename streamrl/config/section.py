"""The base of every configuration section.

Invariant: a section is frozen and refuses keys that it does not know.
"""

from pydantic import BaseModel, ConfigDict


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
