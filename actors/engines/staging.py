"""A complete update in host memory, until the engine's pause.

Invariant: `fill` keeps every tensor of one update or raises; memory is reused from one update to
the next. What an engine loads is always a whole model: one of LoRA's factors is merged into the
parameters of the model's folder on arrival.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import torch

from streamrl.types import TensorSpec
from streamrl.vision.families import load_pretrained
from streamrl.weights.codecs import lora


class StagedWeights:
    """Host copies by name, in the order of arrival; pinned if a GPU reads them."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._host: dict[str, torch.Tensor] = {}

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the tensors, each of which has to be valid only until the next is requested."""
        names = set()
        for name, tensor in tensors:
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self._is_pinned)
                self._host[name] = kept
            kept.copy_(tensor)
            names.add(name)
        for name in self._host.keys() - names:
            del self._host[name]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._host.items())


class WholeModel:
    """Completes updates of LoRA's factors with the model at `path`, in host memory from the first
    such update on."""

    def __init__(self, path: str, *, trust_remote_code: bool) -> None:
        self._path = path
        self._trust_remote_code = trust_remote_code

    def tensors(
        self, manifest: Iterable[TensorSpec], received: lora.Tensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the model, in the precision of its folder; others as they arrived."""
        if not lora.is_of_factors(manifest):
            yield from received
            return
        others = dict(self._base)
        for name, tensor in lora.merged(received, self._base.__getitem__):
            yield name, tensor.to(others.pop(name).dtype)
        yield from others.items()

    @cached_property
    def _base(self) -> Mapping[str, torch.Tensor]:
        trust = self._trust_remote_code
        model = load_pretrained(self._path, dtype="auto", trust_remote_code=trust)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
