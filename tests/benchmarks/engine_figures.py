"""One inference engine on the workloads of bench_engine.py: speed, updates, and parity.

    .venv-sglang/bin/python tests/benchmarks/engine_figures.py sglang

bench_engine.py runs it with the Python of each environment that has an engine. Tokens/s without
and with an update every second; pause and bytes/s of an update; the gap between what the engine
recorded and a forward pass of the same model by transformers in the same precision, in nats. vLLM
answers by turns with bare vLLM's `generate`, in this process: `ratio` and `cpu_ratio` are bare
vLLM's best time and CPU time over ours, those of all processes together. One JSON line per dtype
and workload.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import LlamaForCausalLM

from actors.engines import make_engine
from streamrl.config import RunConfig
from streamrl.interfaces import Engine
from streamrl.types import Completion, SamplingParams
from tests.benchmarks import bench_engine
from tests.benchmarks.peers.usage import cpu_s_of, family
from tests.engines import run_config, update_to

if TYPE_CHECKING:
    from tests.benchmarks.bare_vllm import BareVllm

UPDATE_EVERY_S = 1.0
NUM_COMPARED = 64


async def answer_all(
    engine: Engine, prompts: Sequence[Sequence[int]], lengths: np.ndarray
) -> list[Completion]:
    completions = await asyncio.gather(
        *(
            engine.generate(
                tuple(prompt), SamplingParams(max_new_tokens=int(length), ignore_eos=True)
            )
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )
    assert sum(len(c.token_ids) for c in completions) == lengths.sum()
    return completions


@torch.inference_mode()
def gaps(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> dict[str, float]:
    """Between recorded log-probabilities and the model's, over all tokens."""
    model.set_attn_implementation("sdpa")
    found = []
    for prompt, completion in zip(prompts[:NUM_COMPARED], completions, strict=False):
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        index = torch.from_numpy(completion.token_ids).long()[:, None]
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, index)[:, 0].numpy()
        found.append(np.abs(logprobs - completion.logprobs))
    errors = np.concatenate(found)
    figures = {"mean": errors.mean(), "p99": np.quantile(errors, 0.99), "max": errors.max()}
    return {f"gap_{name}": float(f"{value:.2g}") for name, value in figures.items()}


async def updates(engine: Engine, model: LlamaForCausalLM, folder: Path, until: asyncio.Task):
    """The same weights, once more every second until the task is done; their reports."""
    reports, version = [], engine.policy_version
    while not until.done():
        version += 1
        update = update_to(model, version, folder / "update.safetensors")
        reports.append(await engine.load_weights(update))
        await asyncio.wait([until], timeout=UPDATE_EVERY_S)
    return reports


Seconds = list[tuple[float, float]]
"""By the clock, and of CPU time."""


@contextmanager
def timed(seconds: Seconds) -> Iterator[None]:
    start, cpu_start = time.perf_counter(), cpu_s()
    yield
    seconds.append((time.perf_counter() - start, cpu_s() - cpu_start))


def bare_vllm(config: RunConfig) -> "BareVllm":
    from tests.benchmarks.bare_vllm import BareVllm

    return BareVllm(config)


def cpu_s() -> float:
    """Of this process and of those that it has started."""
    return sum(map(cpu_s_of, family(os.getpid())))


def speed(seconds: Seconds, bare: Seconds, num_tokens: float) -> dict[str, float]:
    """The best of each counts; other work on the machine only ever adds."""
    best_s, best_cpu_s = map(min, zip(*seconds, strict=True))
    figures = {"tokens_per_s": round(num_tokens / best_s)}
    if not bare:
        return figures
    bare_s, bare_cpu_s = map(min, zip(*bare, strict=True))
    return {
        **figures,
        "bare_tokens_per_s": round(num_tokens / bare_s),
        "ratio": round(bare_s / best_s, 3),
        "cpu_ratio": round(bare_cpu_s / best_cpu_s, 3),
    }


async def measure(
    name: str,
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    lengths: np.ndarray,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    num_bytes = sum(p.nbytes for p in model.parameters())
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        # Ignored; without one the tokenizer would be asked, which this model does not have.
        model.config.eos_token_id = model.generation_config.eos_token_id = 1
        model.save_pretrained(folder)
        config = run_config(
            folder,
            engine=name,
            max_num_seqs=arguments.slots,
            max_model_len=512,
            num_threads=arguments.threads,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        start = time.perf_counter()
        engine = make_engine(config, seed=0)
        start_s = time.perf_counter() - start
        seconds: Seconds = []
        bare_seconds: Seconds = []
        with bare_vllm(config) if name == "vllm" else nullcontext() as bare:
            for _ in range(arguments.rounds):
                if bare is not None:
                    with timed(bare_seconds):
                        bare.answer(prompts, lengths)
                with timed(seconds):
                    completions = await answer_all(engine, prompts, lengths)
        start = time.perf_counter()
        answering = asyncio.create_task(answer_all(engine, prompts, lengths))
        reports = await updates(engine, model, folder, answering)
        await answering
        updated_s = time.perf_counter() - start
        await engine.close()
    return {
        **speed(seconds, bare_seconds, float(lengths.sum())),
        "tokens_per_s_with_updates": round(float(lengths.sum()) / updated_s),
        "pause_s": round(float(np.mean([r.pause_s for r in reports])), 4),
        "update_bytes_per_s": round(
            float(np.mean([num_bytes / (r.transfer_s + r.load_s) for r in reports]))
        ),
        "start_s": round(start_s, 1),
        **gaps(model, prompts, completions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["hf", "vllm", "sglang"])
    bench_engine.add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts, workloads = bench_engine.workloads(arguments)
    for dtype in arguments.dtypes:
        for workload, lengths in workloads.items():
            model = bench_engine.make_model(getattr(torch, dtype))
            figures = asyncio.run(measure(arguments.engine, model, prompts, lengths, arguments))
            about = {"benchmark": "engine_figures", "engine": arguments.engine}
            kind = {"dtype": dtype, "workload": workload}
            print(json.dumps({**about, **kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
