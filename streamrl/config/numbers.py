"""Ranges and choices that many settings share."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|(cuda|xpu|mps)(:\d+)?", name):
        raise ValueError(f"was {name!r}; it must be auto, cpu, cuda, cuda:0 (1, ...), mps or xpu")
    return name


Device = Annotated[str, AfterValidator(_device)]
"""A device as torch names it, or auto."""
