"""A second set of parameters, filled while the first one samples, swapped in between two tokens.

Invariant: an update never writes to a parameter in use; `swap` exchanges storage pointers, so
sampling pauses for microseconds however large the model is. It costs memory for one more copy.

Each set has memory of its own with the layout of the update's bytes, so an update in the engine's
precision is received in place. LoRA's factors are merged into the spare set on arrival: each set
then holds the matrices that have some, and the base of these is kept beside them.
"""

from dataclasses import dataclass

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import TensorSpec
from streamrl.weights import lora
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
        self._base: dict[str, torch.Tensor] | None = {
            name: parameter.data for name, parameter in self._active.items()
        }

    def landing(self, manifest: tuple[TensorSpec, ...]) -> torch.Tensor | None:
        """The memory to receive the update in place, None if it is in another precision.

        Called before `stage`, once for each update.

        Raises:
            WeightTransferError: it is of LoRA's factors, after one of a whole model.
        """
        own = self._own(manifest)
        if self._spare is None or self._spare.manifest != own:
            self._spare = _Copy.make(own, next(iter(self._active.values())).device)
        return self._spare.data if own == manifest else None

    def base(self, name: str) -> torch.Tensor:
        """The parameter as it was at the engine's start."""
        assert self._base is not None, "landing() refused the factors"
        return self._base[name]

    def _own(self, manifest: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """What is staged of the update, in the engine's precision."""
        names = tuple(spec.name for spec in manifest)
        if not lora.is_of_factors(manifest):
            self._base = None
        elif self._base is None:
            raise WeightTransferError(
                "LoRA's factors after a whole model: the base is gone, start this generator again"
            )
        else:
            names = tuple(dict.fromkeys(map(lora.matrix_of, names)))
            self._base = {name: self._base[name] for name in names}
        return tuple(
            TensorSpec(name, dtype_name(p.dtype), (*p.shape,))
            for name, p in ((name, self._active[name]) for name in names)
        )

    def stage(self, received: lora.Tensors) -> None:
        """Keeps the tensors of an update for the next swap, in the engine's precision, factors
        merged into their matrices."""
        assert self._spare is not None, "landing() was called"
        for name, tensor in lora.merged(received, self.base):
            view = self._spare.views[name]
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)

    def swap(self) -> None:
        """Makes the staged set active, and the active one the next staging area."""
        assert self._spare is not None, "nothing was staged"
        for name, staged in self._spare.views.items():
            self._active[name].data = staged
        self._used, self._spare = self._spare, self._used
