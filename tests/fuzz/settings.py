"""Short runs of random settings, as many as one likes: what is accepted trains.

    PYTHONPATH=. python tests/fuzz/settings.py --runs 500 [--seed 1]

Settings are drawn from `VALUES` until the configuration accepts them together; a run of three
steps at an uneven lag in one process (`tests.research.exact_lag`) trains a tiny model by
them. What must hold: the run ends without an error, or with a sentence about what the model or the
prompts refuse, and every number of its metrics is finite. Prints a line for each run that does not
train, with its `--set`s and the last line of its log, and one JSON line at the end. A second is
enough for one or two runs.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.make_model import make_model, make_tokenizer
from streamrl.config import load_config
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS
from streamrl.config.model import RecipeSettings
from streamrl.errors import EXIT_CONFIG, ConfigError
from streamrl.interfaces import EnvironmentContext, Observation, Transition
from streamrl.tracking.jsonl import METRICS_FILE, read_metrics
from streamrl.types import Completion
from tests.research.forked import exit_code_of
from tests.research.lag import Lag

SOURCE = str(Path("configs/ablation/lag.yaml").absolute())
LOG = "stderr.log"
# Models in the folder of the runs: one of each kind that a setting may ask for.
MODEL = "model"
EXPERTS = "experts"
OF_EXPERTS = "algorithm.router_replay"
OF_TURNS = "algorithm.echo_coef"
ALWAYS = (
    "run.max_steps=3",
    "generator.group_size=4",
    "learner.groups_per_step=4",
    "learner.optimizer.lr=1e-3",
    "learner.optimizer.warmup_steps=0",
    "buffer.max_staleness=2",
)
ALGORITHM: Mapping[str, Sequence[str]] = {
    "algorithm.advantage": tuple(ADVANTAGE_SETTINGS),
    "algorithm.loss": tuple(LOSS_SETTINGS),
    "algorithm.proximal": ("recompute", "behavior", "loglinear", "linear"),
    "algorithm.rollout_is": (
        *ROLLOUT_IS_PRESETS,
        "{threshold: null}",
        "{level: sequence, threshold: 3, rejection: [{seq_mean_k3: 0.1}]}",
        "{normalize_by: kept, mode: clip, batch_normalize: true}",
        "{scale_lr: true, second_moment: 0.01}",
        "{mode: mask, engine_threshold: 1.5, lag_threshold: 1.2}",
        "{engine_threshold: 1.1}",
    ),
    "algorithm.rescore_share": ("0.5", "1"),
    "learner.updates_per_batch": ("2", "3"),
    "learner.epochs": ("2",),
    "generator.keep_sampling_mask": ("true",),
    "algorithm.kl_loss.coef": ("0.01",),
    "algorithm.kl_reward.coef": ("0.01",),
    "algorithm.distillation": (
        "{teachers: [{path: model}]}",
        "{teachers: [{path: model}], reward_coef: 1.0, coef: 0.1}",
        "{teachers: [{path: model}], student: behavior}",
        "{teachers: [{path: model}], top_k: 4}",
        "{teachers: [{path: model}], top_k: 500, divergence: forward_kl, reward_coef: 1.0}",
        "{teachers: [{name: a, path: model}, {name: b, path: model, weight: 2}]}",
    ),
    "algorithm.reward.difficulty_low": ("0.05",),
    "algorithm.reward.truncated": ("mask", "penalize"),
    "algorithm.pf_ppo": ("{method: pow}", "{method: max_min}", "{method: max_random}"),
    "buffer.max_staleness": ("0", "1", "3", "{min: 0, max: 2}"),
    "generator.group_size": ("1", "2", "5"),
    "learner.groups_per_step": ("1", "3"),
}
VALUES: Mapping[str, Sequence[str]] = {
    **ALGORITHM,
    "algorithm.preset": ("stream", "null"),
    "algorithm.advantage_config.whiten": ("true",),
    "algorithm.advantage_config.clip": ("1.0",),
    "algorithm.advantage_config.gamma": ("0.9",),
    "algorithm.advantage_config.norm_adv_by_std": ("false",),
    "algorithm.advantage_config.rewards": ("{reward/addition: 1.0}",),
    "algorithm.advantage_config.step_weight": ("0.5",),
    "algorithm.advantage_config.decay": ("0", "0.5"),
    "algorithm.advantage_config.role": ("reward/addition",),
    "algorithm.loss_config.log_ratio_coef": ("0.001",),
    "algorithm.loss_config.dro_level": ("sequence",),
    "algorithm.loss_config.loss_agg_mode": (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"),
        "seq-mean-token-sum-norm",
    ),
    "algorithm.loss_config.divergence_topk": ("4",),
    "algorithm.loss_config.clip_ratio_c": ("null",),
    "algorithm.entropy_coef": ("0.01",),
    "algorithm.sft_coef": ("0.1",),
    "algorithm.rl_loss_coef": ("0",),
    OF_TURNS: ("0.05",),
    OF_EXPERTS: ("record", "replay"),
    "algorithm.kl_loss.kind": ("kl", "abs", "mse", "low_var_kl", "full", "low_var_kl+"),
    "algorithm.kl_reward.controller": ("adaptive",),
    "algorithm.value.critic_warmup": ("1", "2"),
    "algorithm.reward.truncated_penalty": ("0.5",),
    "algorithm.reward.norm_mean": ("batch", "group", "running"),
    "algorithm.reward.norm_std": ("batch", "group", "running"),
    "algorithm.reward.clip": ("0.5",),
    "algorithm.reward.length": ("{max_length: 6, buffer: 3}",),
    "algorithm.reward.placement": ("turn",),
    "algorithm.reward.whiten": ("true",),
    "algorithm.reward.difficulty_high": ("0.95",),
    "algorithm.reward.agentic": ("{grouping: batch}", "{method: asym_clip}"),
    "algorithm.sample_weight.length": ("true",),
    "generator.oversample.num_siblings": ("2",),
    "generator.oversample.keep": ("first_finished",),
    "generator.temperature": ("0.7", "1.3"),
    "generator.top_p": ("0.9",),
    "generator.top_k": ("1", "5"),
    "generator.min_new_tokens": ("2",),
    "generator.max_new_tokens": ("1", "4"),
    "generator.max_num_seqs": ("1", "7"),
    "generator.ignore_eos": ("true",),
    "generator.dtype": ("bfloat16", "float16"),
    "generator.lm_head_dtype": ("float32",),
    "generator.stop_token_ids": ("[3]",),
    "learner.max_tokens_per_micro_batch": ("32", "128"),
    "learner.max_tokens_per_forward_pass.proximal": ("64",),
    "learner.optimizer.max_grad_norm": ("null", "0.1"),
    "learner.optimizer.schedule": ("linear", "cosine", "warmup_stable_decay"),
    "learner.optimizer.groups": ('[{parameters: "*.mlp.*", lr: 0}]',),
    "learner.lora": ("{rank: 2}", "{rank: 2, publish: adapter}", "{rank: 2, dropout: 0.1}"),
    "learner.dtype": ("bfloat16", "float16"),
    "learner.gradient_checkpointing": ("true", "2"),
    "learner.report_entropy": ("false",),
    "learner.check_packing": ("false",),
    "data.reward": ("math", "numeric_answer", "format"),
    "run.seed": ("1", "2"),
}


class Twice:
    """The prompt is read again behind the first answer."""

    def __init__(self) -> None:
        self._num_turns = 0

    async def start(self, context: EnvironmentContext) -> Observation:
        self._again = Observation(token_ids=context.prompt_token_ids)
        return self._again

    async def step(self, completion: Completion) -> Transition:
        self._num_turns += 1
        return Transition(observation=self._again, done=self._num_turns == 2)


def needed_by(drawn: Sequence[str]) -> tuple[str, ...]:
    """Further overrides, without which a setting is refused."""
    if not any(one.startswith(OF_TURNS) for one in drawn):
        return ()
    environment = f"{Path(__file__).absolute()}:{Twice.__name__}"
    return (f"generator.environment={environment}", "generator.max_model_len=40")


def write_experts(folder: Path, recipe: RecipeSettings, max_model_len: int) -> None:
    """A mixture of experts of the recipe's size (`model.recipe.architecture`)."""
    tokenizer = make_tokenizer(recipe.alphabet)
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        moe_intermediate_size=recipe.hidden_size,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=max(64, max_model_len),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def make_models(folder: Path, always: Sequence[str]) -> None:
    """Write the models that `model_of` names."""
    own = f"model.recipe.architecture={Path(__file__).absolute()}:{write_experts.__name__}"
    make_model(load_config(SOURCE, [*always, f"model.path={folder / MODEL}"]).config)
    make_model(load_config(SOURCE, [*always, f"model.path={folder / EXPERTS}", own]).config)


def model_of(drawn: Sequence[str]) -> str:
    """The model that these settings are for."""
    return EXPERTS if any(one.startswith(OF_EXPERTS) for one in drawn) else MODEL


def draws(seed: int, always: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Overrides that the configuration accepts together, without end."""
    rng = random.Random(seed)
    while True:
        names = [
            *rng.sample(sorted(ALGORITHM), rng.randint(2, 6)),
            *rng.sample(sorted(VALUES), rng.randint(1, 6)),
        ]
        drawn = tuple(f"{name}={rng.choice(VALUES[name])}" for name in dict.fromkeys(names))
        drawn = (*drawn, *needed_by(drawn))
        try:
            load_config(SOURCE, [*always, *drawn])
        except ConfigError:
            continue
        yield drawn


def nonfinite(run: Path) -> list[str]:
    """Metrics of the run that are no finite numbers."""
    lines = read_metrics(run / METRICS_FILE)
    return [
        name
        for line in lines
        for name, value in line.items()
        if not isinstance(value, int | float) or not math.isfinite(value)
    ]


def run_one(name: str, overrides: Sequence[str], folder: Path) -> tuple[int, str]:
    """The exit code, and what is wrong; nothing may be. What a run writes to stderr is in `LOG`."""
    log = folder / LOG
    start = log.stat().st_size
    exit_code = exit_code_of(Lag.UNEVEN, SOURCE, [*overrides, f"run.name={name}"])
    if exit_code:
        return exit_code, log.read_bytes()[start:].decode().strip().rpartition("\n")[2]
    found = nonfinite(folder / "runs" / name)
    return exit_code, f"not finite: {found}" if found else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Teachers are named from here.
        os.chdir(folder)
        always = (*ALWAYS, f"run.folder={folder / 'runs'}")
        make_models(folder, always)
        # Runs are forked from a process that has the stderr of this one at its start.
        with (folder / LOG).open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        for index, drawn in zip(range(given.runs), draws(given.seed, always), strict=False):
            settings = (*always, f"model.path={folder / model_of(drawn)}", *drawn)
            exit_code, wrong = run_one(f"run{index}", settings, folder)
            is_refused = exit_code == EXIT_CONFIG
            counts["refused" if is_refused else "failed" if wrong else "trained"] += 1
            if wrong:
                print(exit_code, wrong, *(f"--set '{one}'" for one in drawn), flush=True)
    print(json.dumps(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
