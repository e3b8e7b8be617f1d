"""Ranges and choices that many settings share."""

from typing import Annotated, Literal

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
