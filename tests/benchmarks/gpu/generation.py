"""Tokens/s of our vLLM engine beside bare vLLM's `generate`, on the same requests.

    PYTHONPATH=. python tests/benchmarks/gpu/generation.py [--small] [--requests 512] [--rounds 2]

A model with random weights (the shape of Qwen2.5-0.5B; `--small`: a tiny one, in float32, for
vLLM's build for CPUs), requests of log-normal and of equal lengths, the same arguments of vLLM for
both but for what makes the engine asynchronous. Each contender runs in a process of its own, by
turns; the best round counts. One JSON line a workload; without vLLM it says so. report.py runs it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.config import RunConfig
from tests.benchmarks.gpu.learner import SHAPES, make_model

CONTENDERS = ("bare", "ours")
NUM_PROMPT, MEAN = 64, 192
SMALL_MEAN = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(contender(options)))
        return
    about = {"benchmark": "gpu_generation", "requests": options.requests}
    if find_spec("vllm") is None:
        print(json.dumps({**about, "skipped": "vLLM is not installed"}))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), small=options.small)
        best: dict[str, dict[str, float]] = {name: {} for name in CONTENDERS}
        for _ in range(options.rounds):
            for name in CONTENDERS:
                for workload, rate in run(name, Path(folder)).items():
                    best[name][workload] = max(rate, best[name].get(workload, 0.0))
    for workload in best["ours"]:
        bare, ours = best["bare"][workload], best["ours"][workload]
        rates = {"bare_tokens_per_s": round(bare), "tokens_per_s": round(ours)}
        line = {**about, "workload": workload, **rates, "ratio": round(ours / bare, 3)}
        print(json.dumps({**line, "target": 0.97}), flush=True)


def run(name: str, folder: Path) -> dict[str, float]:
    words = [sys.executable, __file__, "--only", name, "--model", str(folder), *sys.argv[1:]]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stdout[-2000:] + ended.stderr[-4000:])
    # vLLM's processes may write after it.
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    rates: dict[str, float] = json.loads(lines[-1])
    return rates


def save_model(folder: Path, *, small: bool) -> None:
    if small:
        # vLLM's kernels for CPUs take heads of 32.
        shape = {**SHAPES["tiny"], "hidden_size": 64, "head_dim": 32}
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).float()
    else:
        model = make_model("0.5B")
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.config.bos_token_id = None
    model.save_pretrained(folder)


def contender(options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s by workload."""
    config = config_of(options)
    found = workloads(options)
    measure = bare if options.only == "bare" else ours
    return measure(config, *found)


def config_of(options: argparse.Namespace) -> RunConfig:
    generator: dict[str, Any] = {
        "engine": "vllm",
        "max_num_seqs": 256,
        "max_new_tokens": 7 * MEAN,
        "dtype": "float32" if options.small else "bfloat16",
        "num_threads": 1 if options.small else 0,
    }
    return RunConfig.model_validate(
        {
            "run": {"folder": str(options.model / "runs")},
            "model": {"path": str(options.model)},
            "data": {
                "source": "addition",
                "max_prompt_length": NUM_PROMPT,
                "chat_template": "none",
            },
            "generator": generator,
        }
    )


def workloads(options: argparse.Namespace) -> tuple[list[list[int]], dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    vocabulary = SHAPES["tiny" if options.small else "0.5B"]["vocab_size"]
    prompts = rng.integers(2, vocabulary, (options.requests, NUM_PROMPT)).tolist()
    mean = SMALL_MEAN if options.small else MEAN
    drawn = np.minimum(rng.lognormal(0.0, 1.0, options.requests), 6.5)
    long_tailed = np.maximum(1, np.rint(drawn * mean / drawn.mean())).astype(int)
    return prompts, {
        "log-normal": long_tailed.clip(max=7 * mean).tolist(),
        "equal": [mean] * options.requests,
    }


def bare(
    config: RunConfig, prompts: list[list[int]], lengths_of: dict[str, list[int]]
) -> dict[str, float]:
    from tests.benchmarks.bare_vllm import BareVllm

    vllm = BareVllm(config)
    rates = {}
    for workload, lengths in lengths_of.items():
        vllm.answer(prompts, [8] * len(lengths))
        start = time.perf_counter()
        vllm.answer(prompts, lengths)
        rates[workload] = sum(lengths) / (time.perf_counter() - start)
    return rates


def ours(
    config: RunConfig, prompts: list[list[int]], lengths_of: dict[str, list[int]]
) -> dict[str, float]:
    return asyncio.run(_ours(config, prompts, lengths_of))


async def _ours(
    config: RunConfig, prompts: list[list[int]], lengths_of: dict[str, list[int]]
) -> dict[str, float]:
    from actors.engines import make_engine
    from streamrl.types import SamplingParams

    engine = make_engine(config, seed=0)

    async def answer(lengths: list[int]) -> None:
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
        asked = zip(prompts, params, strict=True)
        await asyncio.gather(*(engine.generate(prompt, some) for prompt, some in asked))

    rates = {}
    for workload, lengths in lengths_of.items():
        await answer([8] * len(lengths))
        start = time.perf_counter()
        await answer(lengths)
        rates[workload] = sum(lengths) / (time.perf_counter() - start)
    await engine.close()
    return rates


if __name__ == "__main__":
    main()
