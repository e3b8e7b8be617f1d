"""A complete update in host memory, until the engine's pause.

Invariant: `fill` keeps every tensor of one update or raises; memory is reused from one update to
the next.
"""

from collections.abc import Iterable, Iterator

import torch


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
