"""Turns token ids and media into a text model's inputs: embeddings, and positions on three axes.

Invariant: an embedding depends only on the media of its own trajectory, whatever else is in the
call; a medium that several trajectories share goes through the tower once. Called by: the HF engine
for prompts, the learner's network for micro-batches.
Shapes: B rows, L tokens of a row, H hidden size, P patches, T tokens of one conversation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel

from streamrl.types import Media
from streamrl.types.media import distinct
from streamrl.vision.families import has_vision
from streamrl.vision.patches import PatchReader
from streamrl.vision.places import Placeholders


class VisionTower:
    """The vision part of a model; without `is_trained` it passes no gradient back."""

    def __init__(
        self, model: PreTrainedModel, reader: PatchReader, *, is_trained: bool = True
    ) -> None:
        self._model: Any = model
        self.reader = reader
        self.placeholders = Placeholders.of(model.config)
        self._is_trained = is_trained

    def embed(
        self, token_ids: torch.Tensor, media: Sequence[Sequence[Media]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Embeddings [B, L, H] of the tokens [B, L], with the media's features in their places.

        Args:
            media: the media of each conversation.
            starts: where each conversation begins among the flat tokens [B * L].

        Raises:
            RolloutError: a medium has no place, or is malformed.
        """
        embeddings: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        flat_ids = token_ids.flatten().tolist()
        ends = [*starts[1:], len(flat_ids)]
        rows = [
            torch.arange(start + place.start, start + place.stop)
            for start, end, own in zip(starts, ends, media, strict=True)
            for place in self.placeholders.find(flat_ids[start:end], self._sizes(own))
        ]
        features = self._features([m for own in media for m in own], embeddings)
        if features is None:
            return embeddings + self._nothing(embeddings)
        places = torch.cat(rows).to(embeddings.device)
        flat = embeddings.flatten(0, 1).index_copy(0, places, features)
        return flat.view_as(embeddings)

    def inputs(self, token_ids: torch.Tensor, media: Sequence[Sequence[Media]]) -> dict[str, Any]:
        """The arguments of the model's `forward` for conversations as rows [B, L], padded on the
        right."""
        starts = range(0, token_ids.numel(), token_ids.shape[1])
        rows = zip(token_ids.tolist(), media, strict=True)
        positions = torch.stack([self.positions(ids, own) for ids, own in rows], dim=1)
        return {
            "inputs_embeds": self.embed(token_ids, media, starts),
            "position_ids": positions.to(token_ids.device),
        }

    def positions(self, token_ids: Sequence[int], media: Sequence[Media]) -> torch.Tensor:
        """Positions [3, T] of a conversation in time, height and width.

        Each text token after it continues the positions by one: see `offset`.
        """
        if not media:
            return torch.arange(len(token_ids)).expand(3, -1)
        patches = [self.reader.read(medium) for medium in media]
        images, videos = (
            [p for p, m in zip(patches, media, strict=True) if m.kind == kind]
            for kind in ("image", "video")
        )
        positions: torch.Tensor
        positions, _ = self._model.model.get_rope_index(
            torch.tensor([list(token_ids)]),
            mm_token_type_ids=self._kinds(token_ids, media),
            image_grid_thw=torch.tensor([p.grid for p in images]).view(-1, 3),
            video_grid_thw=torch.tensor([p.grid for p in videos]).view(-1, 3),
            second_per_grid_ts=torch.tensor([p.seconds_per_grid for p in videos]),
        )
        return positions[:, 0]

    def offset(self, token_ids: Sequence[int], media: Sequence[Media]) -> int:
        """The difference between position and index of a token that follows this conversation."""
        return int(self.positions(token_ids, media).max()) + 1 - len(token_ids)

    def plain_inputs(self, token_ids: Sequence[int], images: Sequence[Media]) -> dict[str, Any]:
        """The arguments of the model's own `forward` for one conversation with these images."""
        if not images:
            return {}
        patches = [self.reader.read(image) for image in images]
        values = torch.from_numpy(np.concatenate([p.values for p in patches]))
        inputs = {
            "pixel_values": values.to(self._model.dtype),
            "image_grid_thw": torch.tensor([p.grid for p in patches]),
            "mm_token_type_ids": self._kinds(token_ids, images),
        }
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def _kinds(self, token_ids: Sequence[int], media: Sequence[Media]) -> torch.Tensor:
        """The kind of each token [1, T]: 1 for an image's, 2 for a video's, 0 for text."""
        kinds = torch.zeros(1, len(token_ids), dtype=torch.int64)
        for place in self.placeholders.find(token_ids, self._sizes(media)):
            kinds[0, place.start : place.stop] = 1 if place.kind == "image" else 2
        return kinds

    def _nothing(self, like: torch.Tensor) -> torch.Tensor | float:
        """A zero, which passes a zero gradient to the tower if other ranks may have a gradient
        there: ranks that share its parameters must all add gradients for the same parameters."""
        is_shared = distributed.is_initialized() and distributed.get_world_size() > 1
        if not (is_shared and self._is_trained and torch.is_grad_enabled()):
            return 0.0
        tower = self._model.model.visual
        side = tower.spatial_merge_size
        width = tower.patch_embed.in_channels * tower.patch_embed.temporal_patch_size
        blank = like.new_zeros(side * side, width * tower.patch_embed.patch_size**2)
        grid = torch.tensor([[1, side, side]], device=like.device)
        seen: torch.Tensor = tower(blank, grid_thw=grid).pooler_output
        return 0.0 * seen.sum().to(like.dtype)

    def _sizes(self, media: Sequence[Media]) -> list[Any]:
        return [self.reader.size(medium) for medium in media]

    def _features(self, media: Sequence[Media], like: torch.Tensor) -> torch.Tensor | None:
        """Features [tokens of all media, H], in order; None without media."""
        unique = distinct(media)
        if not unique:
            return None
        patches = [self.reader.read(medium) for medium in unique]
        values = torch.from_numpy(np.concatenate([p.values for p in patches]))
        grids = torch.tensor([p.grid for p in patches], device=like.device)
        with torch.set_grad_enabled(self._is_trained and torch.is_grad_enabled()):
            output = self._model.model.visual(values.to(like), grid_thw=grids)
        parts = output.pooler_output.split([self.reader.size(m).num_tokens for m in unique])
        of = {medium.id: part for medium, part in zip(unique, parts, strict=True)}
        return torch.cat([of[medium.id] for medium in media]).to(like.dtype)


def vision_tower(
    model: PreTrainedModel, reader: PatchReader | None, *, is_trained: bool = True
) -> VisionTower | None:
    """The vision tower of a model that sees images; None for any other model."""
    if reader is None or not has_vision(model.config):
        return None
    return VisionTower(model, reader, is_trained=is_trained)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Use this implementation of attention in the text model; a vision tower keeps its own."""
    if not has_vision(model.config):
        model.set_attn_implementation(name)
        return
    tower: str = model.config.vision_config._attn_implementation or "eager"
    model.set_attn_implementation({"": name, "text_config": name, "vision_config": tower})
