"""A small Qwen2.5-VL and the other files of its folder: a tokenizer of characters with the special
tokens of images, a chat template, an image processor.

Images are small: a patch has PATCH x PATCH pixels, and four patches are one token.
"""

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from actors.make_model import make_tokenizer

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


def write(folder, recipe, max_model_len):
    """Write the untrained model of `model.recipe`; `recipe` is that section with its defaults."""
    tokenizer = tokenizer_of(recipe)
    config = config_of(recipe, max_model_len, tokenizer)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)


def tokenizer_of(recipe):
    tokenizer = make_tokenizer(recipe.alphabet, SPECIAL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def config_of(recipe, max_model_len, tokenizer):
    """The architecture; the vision tower is as wide as the text model."""
    width, heads = recipe.hidden_size, recipe.num_heads
    half = width // heads // 2
    text = {
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


def image_processor():
    """Return the processor of images of 1 to 64 tokens."""
    side = PATCH * MERGE
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        size={"shortest_edge": side * side, "longest_edge": 64 * side * side},
    )
