"""A small Qwen2.5-VL with what its folder needs beside weights: special tokens, a chat template, an
image processor. Made locally by `model.recipe.vision`, see make_model.py.

Images are small: PATCH pixels a side of a patch, of which four are one token.
"""

from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

from streamrl.config.model import RecipeSettings

PATCH = 8
MERGE = 2
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (START, END, IMAGE, VIDEO)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}" + START + IMAGE + END + ""
    "{% elif part.type == 'video' %}" + START + VIDEO + END + ""
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
)


def vision_config(
    recipe: RecipeSettings, max_model_len: int, tokenizer: PreTrainedTokenizerFast
) -> Qwen2_5_VLConfig:
    """The architecture; the vision tower is as wide as the text model."""
    width, heads = recipe.hidden_size, recipe.num_heads
    half = width // heads // 2
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": max(64, max_model_len),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "initializer_range": recipe.initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": recipe.num_layers,
        "hidden_size": width,
        "intermediate_size": recipe.intermediate_size,
        "num_heads": heads,
        "out_hidden_size": width,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 2 * PATCH * MERGE,
        "fullatt_block_indexes": [recipe.num_layers - 1],
        "initializer_range": recipe.initializer_range,
    }
    start, end, image, video = (tokenizer.get_vocab()[token] for token in SPECIAL)
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Of images from one token up to 64."""
    side = PATCH * MERGE
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        size={"shortest_edge": side * side, "longest_edge": 64 * side * side},
    )
