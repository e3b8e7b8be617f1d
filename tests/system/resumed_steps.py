"""Trains some steps on recorded groups, from the run's newest checkpoint if it has one, and saves.

    python -m tests.system.resumed_steps RUN MODEL LAST_STEP

Prints a line a step: its metrics without times, and a number of each random generator.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from actors.make_model import make_tokenizer
from learners.checkpoints.records import RunRecords
from learners.checkpoints.restore import choose, restore
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.types import GroupHeader
from tests.records import make_group
from tests.tiny_model import save_llama
from tests.training import make_batch, make_config

ALGORITHM = {
    "advantage": "gae",
    "kl_reward": {"coef": 0.1, "controller": "adaptive"},
    "reward": {"norm_mean": "running", "norm_std": "running"},
    "pf_ppo": {},
}


def configure(run: Path, model: Path) -> RunConfig:
    if not model.exists():
        save_llama(model)
        make_tokenizer("abc").save_pretrained(model)
    return make_config(
        model={"path": str(model)},
        run={"folder": run.parent, "name": run.name, "resume": "auto"},
        learner={"device": "cpu"},
        optimizer={"schedule": "cosine", "warmup_steps": 2},
        algorithm=ALGORITHM,
    )


def main(run: Path, model: Path, last_step: int) -> None:
    torch.set_num_threads(1)
    config = configure(run, model)
    start = choose(config.run)
    critic = Critic.from_config(config)
    trainer = Trainer(config, Policy.from_config(config), Policy.from_config(config), critic)
    state = LearnerState()
    if start.checkpoint is not None:
        state = restore(start.checkpoint, config, trainer)
    else:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
    records = RunRecords(config, start)
    records.begin()
    for step in range(state.policy_version, last_step):
        metrics = trainer.step(make_batch(step))
        fixed = {name: value for name, value in metrics.items() if not is_measured(name)}
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        print(json.dumps([step, fixed, numbers]))
        records.log(step + 1, [GroupHeader.of(make_group(step, version=step))], metrics)
    records.save(trainer, LearnerState(last_step)).result()
    records.close()


def is_measured(name: str) -> bool:
    """Whether the metric is a time, or a rate or a share of it."""
    return name.endswith(("_s", "_frac", "mfu"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
