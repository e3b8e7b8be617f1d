"""A Qwen2.5-VL small enough to be made in milliseconds, with its tokenizer and image processor:
that of the recipe `colors`."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from streamrl.config.model import RecipeSettings
from streamrl.types import Media
from streamrl.user_code import load_user_code
from streamrl.vision.patches import PatchReader
from tests.documents import ROOT

COLORS = ROOT / "configs" / "recipes" / "colors"
config_of, image_processor, tokenizer_of = (
    load_user_code("model.recipe.architecture", f"{COLORS / 'tiny_qwen.py'}:{name}")
    for name in ("config_of", "image_processor", "tokenizer_of")
)
RECIPE = RecipeSettings(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, alphabet="abcdefgh?"
)
TOKENIZER = tokenizer_of(RECIPE)
START, END, IMAGE, VIDEO = (
    TOKENIZER.convert_tokens_to_ids(f"<|{name}|>")
    for name in ("vision_start", "vision_end", "image_pad", "video_pad")
)


def make_qwen(seed: int = 0, recipe: RecipeSettings = RECIPE) -> Any:
    """With weights so large that log-probabilities depend on all that a token may see."""
    torch.manual_seed(seed)
    config = config_of(recipe, 512, TOKENIZER)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def save_qwen(folder: Path, recipe: RecipeSettings = RECIPE) -> Path:
    make_qwen(recipe=recipe).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def reader() -> PatchReader:
    return PatchReader(image_processor())


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image(width: int, height: int, seed: int = 0) -> Media:
    return Media.image(png(width, height, seed))
