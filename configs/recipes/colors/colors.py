"""Noisy images of one color; the answer is the first letter of the color's name (k for black)."""

import io

import numpy as np
from PIL import Image

from streamrl.interfaces import Prompt

COLORS = {
    "r": (220, 30, 30),
    "g": (30, 180, 60),
    "b": (40, 60, 220),
    "y": (230, 220, 40),
    "w": (240, 240, 240),
    "k": (20, 20, 20),
}


class Colors:
    """Images of random sizes, 16 to `largest` pixels a side."""

    def __init__(self, seed, largest=48, noise=20.0):
        self.seed, self.largest, self.noise = seed, largest, noise

    def __getitem__(self, prompt_index):
        rng = np.random.default_rng([self.seed, prompt_index])
        letter = list(COLORS)[rng.integers(len(COLORS))]
        height, width = rng.integers(16, self.largest + 1, 2)
        pixels = np.array(COLORS[letter]) + rng.normal(0.0, self.noise, (height, width, 3))
        parts = [
            {"type": "image", "image": png(pixels.clip(0, 255).astype(np.uint8))},
            {"type": "text", "text": "?"},
        ]
        return Prompt(({"role": "user", "content": parts},), letter)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
