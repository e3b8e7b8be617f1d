"""HF engine against batched `model.generate`: useful tokens/s on the same requests.

    python tests/benchmarks/bench_engine.py [--requests 512] [--threads 1] [--mean 32]

Two workloads: log-normal lengths (max/mean >= 6) and equal lengths. `generate` runs each batch to
its longest request, as it must, with transformers' own attention (sdpa, its default); both run at
each batch size by turns, and the best of each counts. Where vLLM is installed (.venv-vllm) it gets
the same requests with as many slots as the largest batch. One JSON line per dtype and workload;
nobody imports this.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.hf.engine import HfEngine
from streamrl.interfaces import Engine
from streamrl.types import SamplingParams
from tests.engines import open_engine, update_to

HAS_VLLM = find_spec("vllm") is not None

BATCH_SIZES = (64, 128, 256, 512)
PROMPT_TOKENS = 16
VOCAB_SIZE = 64

Run = Callable[[LlamaForCausalLM, list[list[int]], np.ndarray, int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mean", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB_SIZE, (arguments.requests, PROMPT_TOKENS)).tolist()
    workloads = {
        "log-normal": long_tailed(rng, arguments.requests, arguments.mean),
        "equal": np.full(arguments.requests, arguments.mean),
    }
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        vllm = asyncio.run(measure_vllm(model, prompts, workloads, arguments)) if HAS_VLLM else {}
        for name, lengths in workloads.items():
            figures = compare(model, prompts, lengths, arguments.rounds) | vllm.get(name, {})
            about = {"dtype": str(dtype).removeprefix("torch."), "workload": name}
            setting = {"threads": arguments.threads, "cores": os.cpu_count()}
            shape = {"max_over_mean": round(float(lengths.max() / lengths.mean()), 2)}
            print(json.dumps({"benchmark": "engine", **about, **shape, **setting, **figures}))


def long_tailed(rng: np.random.Generator, count: int, mean: int) -> np.ndarray:
    """Log-normal lengths with this mean, cut so that the longest is 6.5 times the mean."""
    drawn = rng.lognormal(0.0, 1.0, count)
    for _ in range(50):
        drawn = np.minimum(drawn, 6.5 * drawn.mean())
    drawn[drawn.argmax()] = 6.5 * drawn.mean()
    return np.maximum(1, np.rint(drawn * mean / drawn.mean())).astype(int)


def make_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def compare(
    model: LlamaForCausalLM, prompts: list[list[int]], lengths: np.ndarray, rounds: int
) -> dict[str, float]:
    engine, generate = [], []
    for _ in range(rounds):
        for size in BATCH_SIZES:
            engine.append(tokens_per_s(run_engine, model, prompts, lengths, size))
            generate.append(tokens_per_s(run_generate, model, prompts, lengths, size))
    return {
        "ratio": round(max(engine) / max(generate), 3),
        "engine_tokens_per_s": round(max(engine)),
        "generate_tokens_per_s": round(max(generate)),
    }


def tokens_per_s(
    run: Run, model: LlamaForCausalLM, prompts: list[list[int]], lengths: np.ndarray, size: int
) -> float:
    start = time.perf_counter()
    run(model, prompts, lengths, size)
    return float(lengths.sum() / (time.perf_counter() - start))


def run_engine(
    model: LlamaForCausalLM, prompts: list[list[int]], lengths: np.ndarray, batch_size: int
) -> None:
    async def everything() -> None:
        engine = HfEngine(
            model, eos_token_ids=frozenset(), max_num_seqs=batch_size, max_model_len=512
        )
        await answer_all(engine, prompts, lengths)
        await engine.close()

    asyncio.run(everything())


async def answer_all(engine: Engine, prompts: list[list[int]], lengths: np.ndarray) -> None:
    completions = await asyncio.gather(
        *(
            engine.generate(tuple(prompt), SamplingParams(max_new_tokens=int(length)))
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )
    assert sum(len(c.token_ids) for c in completions) == lengths.sum()


async def measure_vllm(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    workloads: dict[str, np.ndarray],
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """By workload; `start_s` and an update's times while it was answering stand beside it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        start = time.perf_counter()
        engine = open_engine(
            Path(folder),
            "vllm",
            max_num_seqs=max(BATCH_SIZES),
            max_model_len=512,
            num_threads=arguments.threads,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        start_s = time.perf_counter() - start
        update = update_to(model, 1, Path(folder) / "update.safetensors")
        measured = {}
        for name, lengths in workloads.items():
            seconds = []
            for _ in range(arguments.rounds):
                start = time.perf_counter()
                await answer_all(engine, prompts, lengths)
                seconds.append(time.perf_counter() - start)
            answering = asyncio.create_task(answer_all(engine, prompts, lengths))
            report = await engine.load_weights(update)
            await answering
            measured[name] = {
                "vllm_tokens_per_s": round(float(lengths.sum()) / min(seconds)),
                "vllm_start_s": round(start_s, 1),
                "vllm_transfer_s": round(report.transfer_s, 4),
                "vllm_pause_s": round(report.pause_s, 4),
            }
        await engine.close()
        return measured


@torch.inference_mode()
def run_generate(
    model: LlamaForCausalLM, prompts: list[list[int]], lengths: np.ndarray, batch_size: int
) -> None:
    model.set_attn_implementation("sdpa")
    for first in range(0, len(prompts), batch_size):
        batch = torch.tensor(prompts[first : first + batch_size])
        longest = int(lengths[first : first + batch_size].max())
        model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            top_k=0,
        )


if __name__ == "__main__":
    main()
