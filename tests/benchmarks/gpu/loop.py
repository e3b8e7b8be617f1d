"""A whole loop on one GPU: seconds a step, what it waits for, and what a weight update costs.

    PYTHONPATH=. python tests/benchmarks/gpu/loop.py [--small] [--engine vllm|hf] [--limit-s 90]

`streamrl launch` of a model with random weights (the shape of Qwen2.5-0.5B; `--small`: a tiny one,
on a CPU), rewards by chance, the learner and the engine on one device, weights by CUDA IPC where
they are on a GPU. The engine is HF's on a CPU, and where vLLM is not installed. From the run's own
metrics: medians from the third step on. One JSON line; a run that fails says why.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from actors.make_model import make_tokenizer
from streamrl.tracking.jsonl import read_metrics
from tests.benchmarks.gpu.learner import make_model

STREAMRL = [sys.executable, "-m", "streamrl.cli.main"]
REWARD = "import random\ndef score(episode):\n    return float(random.random() < 0.5)\n"
FIGURES = {
    "train_s": "learner/train_s",
    "wait_s": "learner/wait_s",
    "update_s": "weights/receive_s",
    "pause_s": "weights/pause_s",
    "tokens_per_s": "generator/tokens_per_s",
    "mfu": "learner/mfu",
    "mismatch_k3_kl": "mismatch/mismatch_k3_kl",
    "staleness": "buffer/staleness_mean",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--engine", choices=("vllm", "hf"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=90.0)
    options = parser.parse_args()
    has_vllm = not options.small and find_spec("vllm") is not None
    engine = options.engine or ("vllm" if has_vllm else "hf")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write(folder, engine, options)
        line = {"benchmark": "gpu_loop", "engine": engine, **launch(folder, options.limit_s)}
    print(json.dumps(line), flush=True)


def write(folder: Path, engine: str, options: argparse.Namespace) -> None:
    tokenizer = make_tokenizer("0123456789")
    model = make_model("tiny" if options.small else "0.5B")
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.bos_token_id = None
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = ({"prompt": f"{index:06d}", "answer": "1"} for index in range(4096))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(folder, engine, options)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def config_of(folder: Path, engine: str, options: argparse.Namespace) -> dict[str, Any]:
    small = options.small
    dtype = "float32" if small else "bfloat16"
    generator: dict[str, Any] = {
        "engine": engine,
        "group_size": 8,
        "max_new_tokens": 16 if small else 256,
        "max_num_seqs": 64 if small else 512,
        "dtype": dtype,
    }
    if engine == "vllm" and not small:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        generator["engine_kwargs"] = {"gpu_memory_utilization": 0.35, "compilation_config": graphs}
    return {
        "run": {
            "name": "loop",
            "folder": str(folder),
            "max_steps": options.steps,
            "evaluate": False,
        },
        "model": {"path": str(folder / "model")},
        "data": {
            "source": str(folder / "rows.jsonl"),
            "reward": f"{folder}/reward.py:score",
            "max_prompt_length": 16,
            "chat_template": "none",
        },
        "generator": generator,
        "algorithm": {"advantage": "grpo", "rollout_is": "token_is"},
        "buffer": {"url": "zmq://127.0.0.1:0", "max_staleness": 2},
        "learner": {
            "groups_per_step": 4 if small else 32,
            "max_tokens_per_micro_batch": 1024 if small else 32_768,
            "dtype": dtype,
            "device": "cpu" if small else "cuda:0",
            "optimizer": {"lr": 1e-6},
            "checkpoint": {"every": 1000},
        },
        "weights": {"address": "tcp://127.0.0.1:0", "dtype": dtype},
    }


def launch(folder: Path, limit_s: float) -> dict[str, Any]:
    """What the run did, until its end or for so long."""
    start = time.monotonic()
    words = [*STREAMRL, "launch", str(folder / "run.yaml"), "--no-view", "--strict"]
    with (folder / "launch.log").open("w") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            code = f"not at its end after {limit_s:g} s"
    line: dict[str, Any] = {"ended": code, "seconds": round(time.monotonic() - start, 1)}
    steps = read_metrics(folder / "loop" / "metrics.jsonl")
    if code != 0:
        line["error"] = (folder / "launch.log").read_text()[-600:]
    return {**line, "steps": len(steps), **figures(steps)}


def figures(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians from the third step on: compilation and first graphs are before."""
    late = steps[2:]
    if len(late) < 2:
        return {}
    times = [step["time_s"] for step in steps[1:]]
    found = {"step_s": statistics.median(b - a for a, b in itertools.pairwise(times))}
    for short, name in FIGURES.items():
        if values := [step[name] for step in late if name in step]:
            found[short] = statistics.median(values)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


if __name__ == "__main__":
    main()
