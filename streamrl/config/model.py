"""`model`: the language model to train, and how to make a small one."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from streamrl.config.section import (
    LearningRate,
    NotNegative,
    Positive,
    PositiveNumber,
    Probability,
    Section,
)
from streamrl.errors import ConfigError
from streamrl.user_code import check_user_code, is_user_code

NOTHING_TO_TEACH = (
    "model.recipe.warm_start_source: prompts without a text or an answer cannot be taught; name "
    "others, or set model.recipe.warm_start_steps: 0"
)
LLAMA = "llama"


def _architecture(name: str) -> str:
    if name == LLAMA:
        return name
    if not is_user_code(name):
        raise ValueError(f"was {name!r}; it must be llama or code of your own, PATH.py:NAME")
    return check_user_code(name)


class RecipeSettings(Section):
    """A small model with a character tokenizer that the launch makes and warm-starts."""

    architecture: Annotated[str, AfterValidator(_architecture)] = LLAMA
    """llama, or PATH.py:NAME: a function (folder, settings, longest sequence) that writes the
    model."""

    hidden_size: Positive = 128
    """Width of the residual stream."""
    intermediate_size: Positive = 384
    """Width of the MLP."""
    num_layers: Positive = 3
    """Decoder layers."""
    num_heads: Positive = 4
    """Attention heads."""
    alphabet: str = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz?"
    """The tokenizer's characters; each is a token."""
    warm_start_source: str | None = None
    """Prompts and answers for the supervised steps; null: those of `data`."""
    warm_start_steps: NotNegative = 400
    """Most supervised steps; 0: the model stays random."""
    warm_start_accuracy: Probability = 0.3
    """Exact match of sampled answers at which the supervised steps end."""
    initializer_range: PositiveNumber = 0.06
    """Standard deviation of the random weights."""
    batch_size: Positive = 128
    """Examples per supervised step."""
    lr: LearningRate = 2e-3
    """Learning rate of the supervised steps."""


class ModelSettings(Section):
    """The model to train, and its tokenizer."""

    path: str
    """Folder or hub name of a Hugging Face causal language model."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; null: that of the model."""
    trust_remote_code: bool = False
    """Allow models that bring their own code."""
    recipe: RecipeSettings | None = None
    """The model that a launch makes if `path` does not exist."""

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path

    @property
    def missing(self) -> RecipeSettings | None:
        """`recipe` if the model has yet to be made from it, otherwise None."""
        return None if Path(self.path).exists() else self.recipe

    def require_made(self) -> None:
        """Raise ConfigError if it is still to be made from `recipe`."""
        if self.missing is not None:
            raise ConfigError(
                f"model.path: there is no {self.path}; `streamrl get-model --config CONFIG` makes "
                "it of model.recipe"
            )
