"""A tiny Llama in GGUF, with a byte-pair tokenizer and a chat template."""

from pathlib import Path

import torch
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijkl", "ab")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
_NORMAL, _CONTROL = 1, 3
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(file: Path) -> LlamaForCausalLM:
    """Write a model with random weights in float32, and return it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    _write_facts(writer, config)
    _write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_gguf_name(name), _as_gguf(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_facts(writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([_CONTROL] * 3 + [_NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _as_gguf(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Queries and keys stand in llama.cpp's order: halves of a rotation beside each other."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
