"""What a teacher in the learner adds to a step, beside a bare forward pass of its model.

A policy and a teacher of one size train 8 groups of 4 on one thread: steps without and with the
teacher, and passes of the teacher alone, in turns. Of the medians: `added` is what a teacher adds,
as a share of its bare pass; `step` what a step with it takes, as a share of one without and the
pass. Seconds of the processor, since others may share the machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from learners.policy.teachers import Teachers
from learners.trainer import Trainer
from tests.training import make_config, make_policy, sibling_batch

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
}
THREADS = 1
MAX_TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(THREADS)
    distillation = {"teachers": [{"path": "unused"}], "student": "behavior"}
    learner = {"max_tokens_per_micro_batch": MAX_TOKENS}
    taught = make_config(algorithm={"distillation": distillation}, learner=learner)
    plain = make_config(algorithm={"preset": "stream", "advantage": "rloo"}, learner=learner)
    settings = taught.algorithm.distillation
    assert settings is not None, "it was given"
    teacher = make_policy(**SIZES)
    teachers = Teachers(settings, {"teacher": teacher}, MAX_TOKENS)
    batch = sibling_batch([(32, (64,) * 4)] * 8)
    with_teacher = Trainer(taught, make_policy(**SIZES), teachers=teachers)
    without = Trainer(plain, make_policy(**SIZES))

    def forward() -> None:
        packed = teacher.network.cut(batch, MAX_TOKENS)
        with torch.no_grad():
            for micro_batch in packed:
                teacher(micro_batch)

    work: dict[str, Callable[[], object]] = {
        "taught_s": lambda: with_teacher.step(batch),
        "plain_s": lambda: without.step(batch),
        "forward_s": forward,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 1):
        for name, do in work.items():
            start_s = time.process_time()
            do()
            seconds[name].append(time.process_time() - start_s)
    # The first of each warms up.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    added = (medians["taught_s"] - medians["plain_s"]) / medians["forward_s"]
    step = medians["taught_s"] / (medians["plain_s"] + medians["forward_s"])
    print(json.dumps({"benchmark": "teacher", **medians, "added": added, "step": step}))


if __name__ == "__main__":
    main()
