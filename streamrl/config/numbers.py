"""Ranges that many settings share."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
