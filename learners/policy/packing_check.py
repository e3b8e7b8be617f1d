"""The comparison at start: the learner's log-probabilities beside those of transformers.

A few random sequences, some longer than the model's windows, go through the network and, one by
one, through the model's own `forward`; for a model that sees there are random images between them.
A model that packing would change is run unpacked; one whose results the learner does not reproduce
either way is refused. Reference and critic follow the policy's decision. Done in the dtype of the
master weights, before the network is cast or divided among ranks.

Invariant: the run's random state, its gradients and its memory are as before.
"""

import itertools
import logging
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from learners.batch.micro_batch import MicroBatch, Packing, SharedPrompts
from learners.policy.decoder import can_be_packed
from learners.policy.network import Network
from streamrl.algorithms.sequences import Sequences
from streamrl.errors import ConfigError, StreamRLError
from streamrl.types import Media
from streamrl.vision.parts import encode_png, pillow
from streamrl.vision.tower import VisionTower, set_attention

log = logging.getLogger(__name__)

_SIZES = ((70, 45), (31, 98))
"""Width and height of the images."""


def with_images(
    tower: VisionTower, token_ids: torch.Tensor, num_images: int
) -> tuple[torch.Tensor, tuple[Media, ...]]:
    """These tokens [T] with random images between them, each between two tokens of text."""
    media = tuple(_image(i) for i in range(num_images))
    image, video = tower.placeholders.image, tower.placeholders.video
    free = next(token for token in range(3) if token not in (image, video))
    is_text = (token_ids != image) & (token_ids != video)
    parts = list(token_ids.where(is_text, free).tensor_split(num_images + 1))
    for i, medium in enumerate(media):
        run = torch.full((tower.reader.size(medium).num_tokens,), image, device=token_ids.device)
        parts[i] = torch.cat([parts[i], run])
    return torch.cat(parts), media


def _image(number: int) -> Media:
    width, height = _SIZES[number % len(_SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Media.image(encode_png(pillow("a random image").fromarray(pixels)))


LENGTHS = (1, 13, 2, 29, 1, 7)
IMAGES = (0, 1, 0, 2)
"""In the first sequences, and so on, of a model that sees images."""
NUM_ALIKE = 6
"""First tokens that sequences have in common, as siblings have their prompt."""
LONGEST = 512
"""Windows are exceeded up to this length, so that the comparison stays cheap."""

SAME = 1e-5
"""Nats, of the mean |difference| in float32: up to here it is rounding."""
REFUSED = 1e-3
"""From here it is another model."""


def choose_packing(network: Network) -> None:
    """Let `network` run packed where that changes nothing, else unpacked.

    Raises:
        ConfigError: its log-probabilities are not those of transformers either way.
    """
    micro_batch = _random_micro_batch(network)
    gpus = [network.device] if network.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(gpus):
        expected = _plain_logprobs(network, micro_batch)
        packed = _compare(network, True, micro_batch, expected)
        if packed.gap <= SAME:
            return
        unpacked = _compare(network, False, micro_batch, expected)
    if not unpacked.gap <= REFUSED:
        raise ConfigError(
            f"model.path: the learner does not compute this {network.model.config.model_type} "
            f"model as transformers does ({unpacked}; up to {REFUSED:g} nats is "
            "rounding), so that it would be trained wrongly"
        )
    # Where both orders of sums differ alike from the plain one, packing is not the reason.
    if packed.gap <= min(3 * unpacked.gap, REFUSED):
        network.run_packed(True)
    else:
        log.info("trajectories run unpacked, each as a row of its own (packed, %s)", packed)


@dataclass(frozen=True)
class _Comparison:
    gap: float
    """Mean |difference| in nats; infinite if there was none."""
    failure: str = ""

    def __str__(self) -> str:
        return self.failure or f"log-probabilities differ by {self.gap:.2g} nats on average"


def _compare(
    network: Network, packed: bool, micro_batch: MicroBatch, expected: torch.Tensor
) -> _Comparison:
    """Of the network, run packed or not, with the `expected` log-probabilities [R]."""
    if packed and not can_be_packed(network.model):
        return _Comparison(inf, "the model's code does not take the bounds of trajectories")
    network.run_packed(packed)
    try:
        return _Comparison(float((network(micro_batch).logprobs - expected).abs().mean()))
    except (StreamRLError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        return _Comparison(inf, f"it fails: {error}")


def _plain_logprobs(network: Network, micro_batch: MicroBatch) -> torch.Tensor:
    """[R] by the model's own `forward` with its reference attention, one trajectory a call."""
    set_attention(network.model, "eager")
    parts = []
    rows = micro_batch.token_ids.split(micro_batch.packing.lengths, dim=1)
    for token_ids, media in zip(rows, micro_batch.media, strict=True):
        seen = network.tower.plain_inputs(token_ids[0].tolist(), media) if network.tower else {}
        output = network.model(input_ids=token_ids, use_cache=False, **seen)
        logits = output.logits[0, :-1].float()
        logprobs = (logits / network.temperature).log_softmax(-1)
        parts.append(logprobs.gather(1, token_ids[0, 1:, None])[:, 0])
    return torch.cat(parts)


def _random_micro_batch(network: Network) -> MicroBatch:
    """Random sequences, of which each token but the first is a response; some begin alike, or have
    images."""
    config: Any = network.model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    windows = {getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    limit = min(LONGEST, getattr(config, "max_position_embeddings", LONGEST))
    lengths = (*LENGTHS, *(w + 5 for w in windows if w and w + 5 <= limit))
    drawn = torch.randint(config.vocab_size, (sum(lengths),), generator=generator)
    alike = next(ids for ids in drawn.split(lengths) if len(ids) > NUM_ALIKE)[:NUM_ALIKE]
    for ids in drawn.split(lengths):
        ids[:NUM_ALIKE] = alike[: len(ids)]
    rows: list[tuple[torch.Tensor, tuple[Media, ...]]] = [(ids, ()) for ids in drawn.split(lengths)]
    if network.tower is not None:
        counts = itertools.cycle(IMAGES)
        rows = [
            with_images(network.tower, ids, n) for (ids, _), n in zip(rows, counts, strict=False)
        ]
    token_ids = torch.cat([ids for ids, _ in rows])[None].to(network.device)
    lengths = tuple(len(ids) for ids, _ in rows)
    packing = Packing(lengths, network.device)
    responses = packing.positions.nonzero()[:, 0]
    alike_of = [min(length, NUM_ALIKE) for length in lengths]
    predictors = responses.numpy(force=True) - 1
    flat = token_ids[0].numpy(force=True)
    return MicroBatch(
        token_ids=token_ids,
        packing=packing,
        predictors=responses - 1,
        targets=token_ids[0, responses],
        members=torch.arange(len(lengths)),
        responses=torch.arange(len(responses)),
        sequences=Sequences.from_lengths([length - 1 for length in lengths]),
        prompt_indices=tuple(range(len(lengths))),
        media=tuple(media for _, media in rows),
        shared_prompts=SharedPrompts.of(
            flat, lengths, alike_of, predictors, network.device, most=1.0
        ),
    )
