"""HF engine against batched `model.generate`, then every engine there is on the same requests.

    python tests/benchmarks/bench_engine.py [--engines hf,vllm] [--dtypes bfloat16]

Two workloads: log-normal lengths (max/mean >= 6) and equal lengths. `generate` runs each batch to
its longest request, as it must, with transformers' own attention (sdpa, its default); both run at
each batch size by turns, and the best of each counts, by the clock and by CPU time, which other
work on the machine disturbs less. Then engine_figures.py measures HF and, from .venv-vllm and
.venv-sglang where they were made, vLLM and SGLang; one that takes longer than --engine-s is ended.
One JSON line per dtype, workload and engine; nobody but engine_figures.py imports this.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.hf.engine import HfEngine
from streamrl.interfaces import Engine
from streamrl.types import SamplingParams
from tests.engines import ENVIRONMENT, ROOT

PYTHONS = {
    "hf": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm/bin/python",
    "sglang": ROOT / ".venv-sglang/bin/python",
}

DTYPES = ("float32", "bfloat16")
BATCH_SIZES = (64, 128, 256, 512)
PROMPT_TOKENS = 16
VOCAB_SIZE = 64

Run = Callable[[LlamaForCausalLM, list[list[int]], np.ndarray, int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts, lengths_of = workloads(arguments)
    for dtype in arguments.dtypes if "hf" in arguments.engines else ():
        model = make_model(getattr(torch, dtype))
        for name, lengths in lengths_of.items():
            figures = compare(model, prompts, lengths, arguments.rounds)
            about = {"dtype": dtype, "workload": name}
            setting = {"threads": arguments.threads, "cores": os.cpu_count()}
            shape = {"max_over_mean": round(float(lengths.max() / lengths.mean()), 2)}
            line = {"benchmark": "engine", **about, **shape, **setting, **figures}
            print(json.dumps(line), flush=True)
    failed = [engine for engine in arguments.engines if not run_figures(engine, arguments)]
    if failed:
        raise SystemExit(f"no figures of {', '.join(failed)}")


def run_figures(engine: str, arguments: argparse.Namespace) -> bool:
    """Whether engine_figures.py has measured the engine. Waits for it, `engine_s` at most."""
    python = PYTHONS[engine]
    if not python.exists():
        print(json.dumps({"benchmark": "engine_figures", "engine": engine, "missing": str(python)}))
        return True
    words = [str(python), str(ROOT / "tests/benchmarks/engine_figures.py"), engine, *sys.argv[1:]]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(arguments.threads)}
    try:
        ended = subprocess.run(
            words, env={**os.environ, **ENVIRONMENT, **own}, timeout=arguments.engine_s
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mean", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=max(BATCH_SIZES))
    parser.add_argument("--engines", type=names_of(PYTHONS), default=list(PYTHONS))
    parser.add_argument("--dtypes", type=names_of(DTYPES), default=list(DTYPES))
    parser.add_argument("--engine-s", type=float, default=900.0)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names


def workloads(arguments: argparse.Namespace) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Prompts, and by name the lengths of their completions."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB_SIZE, (arguments.requests, PROMPT_TOKENS)).tolist()
    long = long_tailed(rng, arguments.requests, arguments.mean)
    return prompts, {"log-normal": long, "equal": np.full(arguments.requests, arguments.mean)}


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
    runs: dict[Run, list[tuple[float, float]]] = {run_engine: [], run_generate: []}
    for _ in range(rounds):
        for size in BATCH_SIZES:
            for run, seconds in runs.items():
                seconds.append(seconds_of(run, model, prompts, lengths, size))
    (engine_s, engine_cpu_s), (generate_s, generate_cpu_s) = (
        tuple(map(min, zip(*seconds, strict=True))) for seconds in runs.values()
    )
    return {
        "ratio": round(generate_s / engine_s, 3),
        "cpu_ratio": round(generate_cpu_s / engine_cpu_s, 3),
        "engine_tokens_per_s": round(float(lengths.sum()) / engine_s),
        "generate_tokens_per_s": round(float(lengths.sum()) / generate_s),
    }


def seconds_of(
    run: Run, model: LlamaForCausalLM, prompts: list[list[int]], lengths: np.ndarray, size: int
) -> tuple[float, float]:
    """By the clock, and of CPU time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    run(model, prompts, lengths, size)
    return time.perf_counter() - start, time.process_time() - cpu_start


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
