#!/bin/sh
# transformers 5.19.0 (torch 2.13.0) sets the embedding of a Youtu model's pad token to zero whenever it
# loads the model, whatever the file says; if the LM head is tied to the embedding, the logit of that token
# is zero, too. An engine that reads the file itself keeps the row, so the two silently differ on the same
# prompt. Llama, saved and loaded in the same way, keeps its row.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   youtu: the row of the pad token in the file has norm 5.66, as loaded 0.00
#   llama: the row of the pad token in the file has norm 5.66, as loaded 5.66
# Exit code 1 if it behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
  "torch==2.13.0" "transformers==5.19.0" numpy
cat > "$folder/look.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, YoutuConfig, YoutuForCausalLM

PAD = 3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": PAD,
    "tie_word_embeddings": True,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def norms(folder, config, kind):
    model = kind(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
    model.save_pretrained(folder)
    with safe_open(next(Path(folder).glob("*.safetensors")), "pt") as file:
        of_file = file.get_tensor("model.embed_tokens.weight")[PAD].norm().item()
    loaded = kind.from_pretrained(folder).get_input_embeddings().weight[PAD].norm().item()
    return of_file, loaded


base = Path(sys.argv[1])
found = {
    "youtu": norms(base / "youtu", YoutuConfig(**SIZES, **LATENT), YoutuForCausalLM),
    "llama": norms(base / "llama", LlamaConfig(**SIZES), LlamaForCausalLM),
}
for name, (of_file, loaded) in found.items():
    print(f"{name}: the row of the pad token in the file has norm {of_file:.2f}, as loaded {loaded:.2f}")
youtu, llama = found["youtu"], found["llama"]
sys.exit(not (youtu[0] > 5 and youtu[1] == 0 and llama[0] == llama[1] > 5))
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
