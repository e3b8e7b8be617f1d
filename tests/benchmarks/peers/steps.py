"""Whole steps beside TRL's GRPOTrainer: the same model, prompts and lengths of all responses.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.steps [--python TRL/bin/python] \
        [--shape small|135M] [--dtype float32|bfloat16] [--threads 1+1,2+2] [--steps N]
        [--micro-batches 1,2]

A model with random weights, 4 groups of 8, responses of log-normal length (median 40, at most 256);
each has the same length on both sides, so both train the same tokens and nothing is dropped. TRL
samples with `model.generate` and trains by turns, on all cores; of its numbers of micro-batches the
fastest counts. Ours is `streamrl launch` with one generator and `buffer.max_staleness`;
`--threads` are those of the learner and of the generator. Seconds per step are from the second step
on, CPU seconds those of all processes; memory as `usage` has it. Ours trains STALENESS steps before
and after those that count, whose groups are TRL's: at the start groups have been sampled ahead, and
at the end there are none left to sample, so that steps would be timed without their sampling.
One JSON line per run.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from actors.make_model import make_tokenizer
from tests.benchmarks.learner_runs import fixed_lengths
from tests.benchmarks.learner_runs.passes import SMALL, SMOLLM2_135M, make_model
from tests.benchmarks.peers.environments import ROOT, environment
from tests.benchmarks.peers.usage import Usage, run

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
TASK = ROOT / "tests" / "benchmarks" / "learner_runs" / "fixed_lengths.py"
WORKER = Path(__file__).with_name("trl_steps.py")
GROUPS, SIZE, MEDIAN, LONGEST, LR = 4, 8, 40, 256, 1e-5
STALENESS = 2
SHAPES = {"small": SMALL, "135M": SMOLLM2_135M}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="a Python that has TRL; else one is made")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", default="1+1,2+2", help="LEARNER+GENERATOR, several by commas")
    parser.add_argument("--micro-batches", default="1")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model", SHAPES[arguments.shape])
        lines = [
            ours(folder, threads, arguments.dtype, arguments.steps)
            for threads in arguments.threads.split(",")
        ]
        python = arguments.python or environment("trl")
        cuts = map(int, arguments.micro_batches.split(","))
        lines = [*(trl(folder, cut, python, arguments) for cut in cuts), *lines]
        theirs = min(line["step_s"] for line in lines if line["system"] == "trl")
        for line in lines:
            ratio = {"ratio": round(theirs / line["step_s"], 2)}
            known = {"benchmark": "steps", "shape": arguments.shape, "dtype": arguments.dtype}
            print(json.dumps({**known, **line, **ratio}), flush=True)


def save_model(folder: Path, shape: dict[str, int]) -> None:
    tokenizer = make_tokenizer(fixed_lengths.ALPHABET)
    model = make_model(shape)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(folder: Path, threads: str, dtype: str, steps: int) -> dict[str, Any]:
    """One launch, with so many threads of the learner + of the generator."""
    name = f"ours-{threads.replace('+', '-')}"
    path = folder / f"{name}.yaml"
    settings = configuration(folder, name, threads, dtype, steps + 2 * STALENESS)
    path.write_text(yaml.safe_dump(settings))
    usage = run([STREAMRL, "launch", str(path), "--no-view"], {"OMP_WAIT_POLICY": "PASSIVE"})
    text = (folder / name / "metrics.jsonl").read_text()
    metrics = [json.loads(line) for line in text.splitlines()][STALENESS:-STALENESS]
    rest, times = metrics[1:], [line["time_s"] for line in metrics]
    return {
        "system": "streamrl",
        "threads": threads,
        **step_figures(usage, times),
        "wait_s": round(sum(line["learner/wait_s"] for line in rest) / len(rest), 3),
        "trained_tokens": sum(round(tokens_of(line)) for line in metrics),
        "peak_mib": round(usage.peak_mib),
    }


def tokens_of(line: dict[str, Any]) -> float:
    return float(line["response_length/mean"]) * GROUPS * SIZE


def configuration(folder: Path, name: str, threads: str, dtype: str, steps: int) -> dict[str, Any]:
    learner_threads, generator_threads = map(int, threads.split("+"))
    return {
        "run": {"name": name, "folder": str(folder), "max_steps": steps, "evaluate": False},
        "model": {"path": str(folder / "model")},
        "data": {
            "source": f"{TASK}:Numbers",
            "source_kwargs": {"median": MEDIAN, "longest": LONGEST},
            "reward": f"{TASK}:rewards",
            "max_prompt_length": fixed_lengths.PROMPT_TOKENS,
        },
        "generator": {
            "group_size": SIZE,
            "max_new_tokens": LONGEST,
            "max_num_seqs": GROUPS * SIZE,
            "num_threads": generator_threads,
            "dtype": dtype,
        },
        "algorithm": {"advantage": "grpo"},
        "buffer": {"url": "zmq://127.0.0.1:0", "max_staleness": STALENESS},
        "learner": {
            "groups_per_step": GROUPS,
            "max_tokens_per_micro_batch": 1024,
            "num_threads": learner_threads,
            "dtype": dtype,
            "optimizer": {"lr": LR},
            "checkpoint": {"every": 1000},
        },
        "weights": {"address": "tcp://127.0.0.1:0"},
    }


def trl(
    folder: Path, micro_batches: int, python: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    output = folder / f"trl-{micro_batches}"
    output.mkdir()
    settings = {
        **{"steps": arguments.steps, "first_prompt": STALENESS * GROUPS},
        **{"groups_per_step": GROUPS, "group_size": SIZE, "median": MEDIAN, "longest": LONGEST},
        "num_threads": os.cpu_count(),
        "micro_batches": micro_batches,
        **{"dtype": arguments.dtype, "lr": LR, "folder": str(output)},
        **{"model": str(folder / "model"), "eos": make_tokenizer("").eos_token_id},
    }
    file = output / "settings.json"
    file.write_text(json.dumps(settings))
    usage = run([str(python), str(WORKER), str(file)], {"PYTHONPATH": str(ROOT)})
    record = json.loads((output / "trl.json").read_text())
    times = record["times"]
    return {
        "system": "trl",
        "micro_batches": micro_batches,
        **step_figures(usage, times),
        "trained_tokens": sum(record["lengths"]),
        "peak_mib": round(usage.peak_mib),
    }


def step_figures(usage: Usage, times: Sequence[float]) -> dict[str, float]:
    """Of steps that ended at these times, the first left out."""
    num_steps = len(times) - 1
    return {
        "step_s": round((times[-1] - times[0]) / num_steps, 3),
        "step_cpu_s": round(usage.cpu_between(times[0], times[-1]) / num_steps, 3),
    }


if __name__ == "__main__":
    main()
