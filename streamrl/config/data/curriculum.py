"""`data.curriculum`: easy rows first."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class CurriculumSettings(Section):
    """The order of the rows within an epoch follows a column instead of chance alone."""

    column: str = "difficulty"
    """Column of a number; a dot reaches into a record."""
    order: Literal["ascending", "descending"] = "ascending"
    """Which rows come first: those with small numbers, or with large ones."""
    window: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How far chance moves a row, as a share of all rows; 0 sorts strictly."""
    num_epochs: Positive = 1
    """Epochs in this order; those that follow are shuffled as `data.shuffle` says."""
