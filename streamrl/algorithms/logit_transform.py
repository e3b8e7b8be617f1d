"""What a model does to its logits before the softmax, when it samples and when it is trained."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What is done to hidden @ weight.T before the softmax; the same as when sampling.

    First multiplication by `scale` (Granite, Cohere), then `softcap * tanh(logits / softcap)`
    (Gemma 2), then division by the temperature.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(
                f"temperature is {self.temperature}, softcap {self.softcap}; both must be positive"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def apply_(self, logits: Tensor) -> Tensor:
        """The same in place, without gradient."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    @property
    def slope(self) -> float:
        """Of the transform without its softcap."""
        return self.scale / self.temperature

    def uncap_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient before the softcap, in place, from transformed `logits`."""
        if self.softcap is not None:
            share = logits.mul(self.temperature / self.softcap)
            gradient = gradient.mul_(share.square_().neg_().add_(1.0))
        return gradient


PLAIN_LOGITS = LogitTransform()
