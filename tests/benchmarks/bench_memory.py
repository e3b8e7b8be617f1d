"""The planner's estimate of a learner's memory against its measured peak on the CPU.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/bench_memory.py

One rank trains one micro-batch of eight layers of SmolLM2-135M's shape, with random weights:
forward, backward and the update of AdamW, twice, in a process of its own. The peak is what the
process needs beyond what it had before the model was made. The estimate is that of `streamrl plan`
without what there is on a GPU alone: the driver, its larger blocks of logits, and weights to send.
"""

import argparse
import json
import os
import subprocess
import sys

import torch
from measure import measured
from transformers import LlamaForCausalLM

from learners.policy.network import Network
from learners.policy.sharding import checkpoint_layers, compute_in
from streamrl.config import RunConfig
from streamrl.placement.memory import LearnerMemory, ModelShape
from tests.benchmarks.learner_runs.passes import SMOLLM2_135M, Load, make_batch, make_model

CASES = {
    "512": {"max_tokens_per_micro_batch": 512},
    "1024": {"max_tokens_per_micro_batch": 1024},
    "512_checkpointed": {"max_tokens_per_micro_batch": 512, "gradient_checkpointing": True},
    "512_bfloat16": {"max_tokens_per_micro_batch": 512, "dtype": "bfloat16"},
}
ON_GPUS = ("CUDA and libraries", "logits")
SHAPE = {**SMOLLM2_135M, "num_hidden_layers": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only")
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(1)
        step = Step(CASES[options.only])
        print(json.dumps({**measured(step, 0), "tokens": step.num_tokens}))
        return
    for case in options.cases.split(","):
        print(json.dumps(line(case)), flush=True)


class Step:
    """A model, one step of it, and its optimizer, made and run at the call."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings
        limit = settings["max_tokens_per_micro_batch"]
        load = Load(SHAPE, 32, 200, 512, max_tokens=limit, padded_sequences=1)
        self._micro_batch = next(iter(make_batch(load).pack(limit, torch.device("cpu"))))
        self.num_tokens = self._micro_batch.token_ids.numel()

    def __call__(self) -> None:
        model: LlamaForCausalLM = make_model(SHAPE)
        masters = list(model.parameters())
        network = Network(model, temperature=1.0)
        if self._settings.get("gradient_checkpointing"):
            checkpoint_layers(network, on_host=False)
        compute_in(network, getattr(torch, str(self._settings.get("dtype", "float32"))))
        optimizer = torch.optim.AdamW(masters, lr=1e-6)
        for _ in range(2):
            (-network(self._micro_batch).logprobs.sum()).backward()
            optimizer.step()
            for parameter in masters:
                parameter.grad.zero_()


def line(case: str) -> dict[str, object]:
    """Measured and estimated MiB, and the estimate's share of the measured."""
    frugal = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--only", case]
    done = subprocess.run(
        command, env={**os.environ, **frugal}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    estimate = estimated(CASES[case], int(found["tokens"])) / 2**20
    return {
        "benchmark": "memory",
        "case": case,
        "tokens": found["tokens"],
        "measured_mib": round(found["extra_mib"]),
        "estimated_mib": round(estimate),
        "ratio": round(estimate / found["extra_mib"], 2),
    }


def estimated(settings: dict[str, object], num_tokens: int) -> int:
    sections = {
        "model": {"path": "m"},
        "data": {"source": "addition", "max_prompt_length": 16},
        "generator": {"max_new_tokens": 16},
        "learner": {**settings, "max_tokens_per_micro_batch": num_tokens},
    }
    config = RunConfig.model_validate(sections)
    shape = ModelShape.of_facts({**SHAPE, "tie_word_embeddings": True})
    need = LearnerMemory(config, shape, 1, sends=False).need()
    return sum(part.num_bytes for part in need.parts if part.name not in ON_GPUS)


if __name__ == "__main__":
    main()
