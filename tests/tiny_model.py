"""A Llama small enough to be made in milliseconds, and its tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 40
EOS = 1


def make_llama(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        **overrides,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token, of which one ends a sequence."""
    words = {"</s>" if i == EOS else f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="w0")


def save_llama(folder: Path, **overrides: object) -> Path:
    make_llama(**overrides).save_pretrained(folder)
    return folder
