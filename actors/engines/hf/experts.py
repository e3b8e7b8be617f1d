"""Which experts the running rows' tokens were given to, as the model's routers say in each pass.

Invariant: a token keeps the experts of the pass that its log-probability, or that of the token
behind it, is of; passes that only fill a cache again record nothing.
Shapes: n rows of a pass, L decoder layers, K experts of a token.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from actors.engines.hf.cache import Compaction
from streamrl.algorithms.routing import choosing, layer_of, routers
from streamrl.types import RoutedExperts

Experts = NDArray[np.int16]


class ExpertRecords:
    """One entry for each running row, None for one that asks for no record."""

    def __init__(self) -> None:
        self._rows: list[list[Experts] | None] = []

    def open(self, prompt: Experts | None) -> None:
        """Adds a last row, with the experts of its prompt [P, L, K]."""
        self._rows.append(None if prompt is None else [prompt])

    @property
    def is_asked(self) -> bool:
        return any(row is not None for row in self._rows)

    def append(self, experts: Sequence[Experts]) -> None:
        """Of the one token [1, L, K] that each row gave the model."""
        for row, own in zip(self._rows, experts, strict=True):
            if row is not None:
                row.append(own)

    def of(self, row: int, num_tokens: int) -> RoutedExperts | None:
        """Of the row's prompt and completion, `num_tokens` in all."""
        recorded = self._rows[row]
        return None if recorded is None else RoutedExperts.of(np.concatenate(recorded), num_tokens)

    def compact(self, moves: Compaction) -> None:
        moves.apply(self._rows)


class ExpertWatch:
    """Of one model, whose routers tell it what they take."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            ConfigError: the model has no routers, or ones that are not known.
        """
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._last: dict[int, torch.Tensor] = {}
        for name, router in routers(model, "algorithm.router_replay: was not off").items():
            choosing(router, partial(self._keep, layer_of(name)[1]))

    def _keep(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        self._last[layer] = experts
        return experts

    def of_rows(self, lengths: Sequence[int], *, is_left_padded: bool) -> list[Experts]:
        """[length, L, K] of each row of the last pass, without its padding."""
        width = {experts.shape[-1] for experts in self._last.values()}.pop()
        num_tokens = len(next(iter(self._last.values())))
        experts = np.zeros((num_tokens, self._num_layers, width), np.int16)
        for layer, taken in self._last.items():
            experts[:, layer] = taken.cpu().numpy()
        rows = experts.reshape(len(lengths), -1, *experts.shape[1:])
        if is_left_padded:
            return [row[len(row) - n :] for row, n in zip(rows, lengths, strict=True)]
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
