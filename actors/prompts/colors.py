"""A procedural task for a vision-language model: an image of one color, and its name."""

from typing import Any

import numpy as np

from streamrl.interfaces import Message
from streamrl.types import Media
from streamrl.vision.pixels import encode_png, pillow

COLORS = {
    "r": (220, 30, 30),
    "g": (30, 180, 60),
    "b": (40, 60, 220),
    "y": (230, 220, 40),
    "w": (240, 240, 240),
    "k": (20, 20, 20),
}
"""By the letter that is the answer."""


def colors(
    rng: np.random.Generator, *, largest: int = 48, noise: float = 20.0
) -> tuple[tuple[Message, ...], str]:
    """A noisy image of a random size up to `largest` pixels a side, and the first letter of its
    color (k for black)."""
    name = list(COLORS)[int(rng.integers(len(COLORS)))]
    height, width = (int(side) for side in rng.integers(16, largest + 1, 2))
    pixels = np.array(COLORS[name]) + rng.normal(0.0, noise, (height, width, 3))
    image = pillow("data.source colors").fromarray(pixels.clip(0, 255).astype(np.uint8))
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Media.image(encode_png(image))},
        {"type": "text", "text": "?"},
    ]
    return ({"role": "user", "content": parts},), name
