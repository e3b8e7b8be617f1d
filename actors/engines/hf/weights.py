"""A second set of parameters, filled while the first one samples, swapped in between two tokens.

Invariant: an update never writes to a parameter in use; `swap` exchanges storage pointers, so
sampling pauses for microseconds however large the model is. It costs memory for one more copy.

Each set has memory of its own with the layout of the update's bytes, so an update in the engine's
precision is received in place.
"""

from dataclasses import dataclass

import torch

from streamrl.types import TensorSpec, replace
from streamrl.weights.layout import Layout, dtype_name


@dataclass(frozen=True)
class _Copy:
    """A set of parameters: its bytes, and views of them by name."""

    manifest: tuple[TensorSpec, ...]
    data: torch.Tensor
    views: dict[str, torch.Tensor]

    @classmethod
    def make(cls, manifest: tuple[TensorSpec, ...], device: torch.device) -> "_Copy":
        layout = Layout(manifest, 1)
        data = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        return cls(manifest, data, {s.spec.name: s.read(s.of(data)) for s in layout.slots})


class SpareWeights:
    """Parameters by name; those the learner does not send keep their values."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._active = dict(model.named_parameters())
        self._used: _Copy | None = None
        self._spare: _Copy | None = None

    def landing(self, manifest: tuple[TensorSpec, ...]) -> torch.Tensor | None:
        """The memory to receive the update in place, None if it is in another precision.

        Called before `stage`, once for each update.
        """
        own = tuple(
            replace(spec, dtype=dtype_name(self._active[spec.name].dtype)) for spec in manifest
        )
        if self._spare is None or self._spare.manifest != own:
            self._spare = _Copy.make(own, next(iter(self._active.values())).device)
        return self._spare.data if own == manifest else None

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps the tensor, cast to the engine's precision, for the next swap."""
        assert self._spare is not None, "landing() was called"
        view = self._spare.views[name]
        if tensor.data_ptr() != view.data_ptr():
            view.copy_(tensor)

    def swap(self) -> None:
        """Makes the staged set active, and the active one the next staging area."""
        assert self._spare is not None, "nothing was staged"
        for name, staged in self._spare.views.items():
            self._active[name].data = staged
        self._used, self._spare = self._spare, self._used
