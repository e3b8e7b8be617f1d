"""A conversation of random tokens with images of different sizes, to compare two computations on.

Called by: the learner's comparison at start.
"""

import numpy as np
import torch

from streamrl.types import Media
from streamrl.vision.pixels import encode_png, pillow
from streamrl.vision.places import Placeholders
from streamrl.vision.tower import VisionTower

_SIZES = ((70, 45), (31, 98))
"""Width and height of the images."""


def with_images(
    tower: VisionTower, token_ids: torch.Tensor, num_images: int
) -> tuple[torch.Tensor, tuple[Media, ...]]:
    """These tokens [T] with random images between them, each between two tokens of text."""
    media = tuple(_image(i) for i in range(num_images))
    text = without_placeholders(tower.placeholders, token_ids)
    parts = list(text.tensor_split(num_images + 1))
    for i, medium in enumerate(media):
        run = torch.full((tower.reader.size(medium).num_tokens,), tower.placeholders.image)
        parts[i] = torch.cat([parts[i], run.to(text.device)])
    return torch.cat(parts), media


def without_placeholders(placeholders: Placeholders, token_ids: torch.Tensor) -> torch.Tensor:
    """Another token in place of each placeholder."""
    taken = (placeholders.image, placeholders.video)
    free = next(token for token in range(3) if token not in taken)
    is_taken = torch.isin(token_ids, torch.tensor(taken, device=token_ids.device))
    return token_ids.masked_fill(is_taken, free)


def _image(number: int) -> Media:
    width, height = _SIZES[number % len(_SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Media.image(encode_png(pillow("a random image").fromarray(pixels)))
