"""`learner.lora`: an adapter of low rank."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class LoraSettings(Section):
    """Training of an adapter of low rank (LoRA, arXiv 2106.09685) instead of all parameters."""

    rank: Positive = 16
    """Columns of A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product of both is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Last parts of the names of the linear layers that get one, such as [q_proj, v_proj]."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapter's inputs, in passes with gradient."""
    publish: Literal["merged", "adapter"] = "merged"
    """What generators are sent: all parameters with the adapter in them, or the adapter alone,
    which they merge into the model of `model.path`: fewer bytes, and one more copy in memory."""
