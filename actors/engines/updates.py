"""The steps of a weight update that are the same in every engine.

    check the manifest | receive, while sampling goes on | load, in a pause | report the times

Invariant: `policy_version` changes in the pause, so a token sampled after it is of the new version.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from actors.engines.model import Shapes, require_same_parameters
from streamrl.types import LoadReport, TensorSpec, WeightUpdate
from streamrl.vision.families import empty_model, load_pretrained
from streamrl.weights import lora


class StagedWeights:
    """A complete update of the model at `path`, copied to host memory (pinned if a GPU reads it)
    until the engine's pause.

    Tensors have the names and division of the model's files, which inference libraries load;
    transformers renames modules and keeps a layer's experts in one tensor. Memory is reused for the
    next update, except for tensors that the files divide differently.
    """

    def __init__(self, path: str, *, trust_remote_code: bool, is_pinned: bool = False) -> None:
        self._path = path
        self._trust_remote_code = trust_remote_code
        self._is_pinned = is_pinned
        self._host: dict[str, torch.Tensor] = {}
        self._in_files: lora.Tensors = ()

    def fill(self, manifest: Iterable[TensorSpec], received: lora.Tensors) -> None:
        """Copy the tensors; each need only be valid until the next is requested."""
        self._in_files = ()  # Its memory is free before the next one is made.
        names = set()
        for name, tensor in self._completed(manifest, received):
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self._is_pinned)
                self._host[name] = kept
            kept.copy_(tensor)
            names.add(name)
        for name in self._host.keys() - names:
            del self._host[name]
        in_files: dict[str, torch.Tensor] = revert_weight_conversion(self._empty, dict(self._host))
        self._in_files = in_files.items()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._in_files)

    def _completed(
        self, manifest: Iterable[TensorSpec], received: lora.Tensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """For an update of LoRA factors: every parameter of the model, in the precision of its
        folder."""
        if not lora.is_of_factors(manifest):
            yield from received
            return
        others = dict(self._base)
        for name, tensor in lora.merged(received, self._base.__getitem__):
            yield name, tensor.to(others.pop(name).dtype)
        yield from others.items()

    @cached_property
    def _empty(self) -> Any:
        return empty_model(self._path, trust_remote_code=self._trust_remote_code)

    @cached_property
    def _base(self) -> Mapping[str, torch.Tensor]:
        trust = self._trust_remote_code
        model = load_pretrained(self._path, dtype="auto", trust_remote_code=trust)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


class UpdatableEngine(ABC):
    """An engine's version, and how it changes; `shapes` are those of its parameters, by name."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.policy_version = 0
        self.learner_id = ""
        self._pause_s = 0.0

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receive the update while sampling goes on, then load it between two steps.

        Raises:
            WeightTransferError: the update is of another model or did not arrive; nothing has
            changed.
        """
        start = perf_counter()
        require_same_parameters(update.manifest, self._shapes)
        await self._receive(update)
        received = perf_counter()
        pause_s = await self._apply(update, partial(self._on_loaded, update))
        self._pause_s += pause_s
        return LoadReport(
            transfer_s=received - start, load_s=perf_counter() - received, pause_s=pause_s
        )

    @abstractmethod
    async def _receive(self, update: WeightUpdate) -> None:
        """Bring the update to where `_apply` finds it.

        Raises:
            WeightTransferError: it did not arrive.
        """

    @abstractmethod
    async def _apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        """Make the received weights the model's, and call `on_loaded` before sampling goes on.
        Returns the seconds in which nothing was sampled."""

    def _on_loaded(self, update: WeightUpdate) -> None:
        self.policy_version, self.learner_id = update.policy_version, update.learner_id
