"""A second set of parameters, filled while the first one samples, swapped in between two tokens.

Invariant: `stage` never touches a parameter in use; `swap` exchanges storage pointers, so sampling
pauses for microseconds however large the model is. The price is memory for one more copy.
"""

import torch

from actors.engines.manifest import require_same_parameters
from streamrl.types import TensorSpec


class SpareWeights:
    """Parameters by name; those the learner does not send (none, as a rule) stay as they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._active = dict(model.named_parameters())
        self._spare: dict[str, torch.Tensor] = {}

    def check(self, manifest: tuple[TensorSpec, ...]) -> None:
        """Refuse a manifest that is not this model's."""
        require_same_parameters(
            manifest, {name: tuple(parameter.shape) for name, parameter in self._active.items()}
        )

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the tensor, cast to the engine's precision, for the next swap."""
        if name not in self._spare:
            self._spare[name] = torch.empty_like(self._active[name].data)
        self._spare[name].copy_(tensor)

    def swap(self) -> None:
        """What was staged becomes active; what was active becomes the next staging area."""
        for name, staged in self._spare.items():
            parameter = self._active[name]
            parameter.data, self._spare[name] = staged, parameter.data
