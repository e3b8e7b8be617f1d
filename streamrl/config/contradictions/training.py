"""Settings of the learner that nothing would use, or that leave nothing to train.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

from streamrl.config.learner import setting_without_pass

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

_SHAPING = (
    "agentic",
    "clip",
    "format_penalty",
    "length",
    "norm_mean",
    "norm_std",
    "truncated",
    "whiten",
)


def memory_setting_without_its_pass(c: "RunConfig") -> str | None:
    return setting_without_pass(c.learner, c.algorithm, c.needs_policy_pass)


def epochs_not_counted(c: "RunConfig") -> str | None:
    """`load_config` counts them, and leaves none."""
    if c.run.total_epochs is None:
        return None
    return (
        f"run.total_epochs {c.run.total_epochs:g} is not counted in steps: read the configuration "
        "with load_config, or set run.max_steps"
    )


def warmup_longer_than_run(c: "RunConfig") -> str | None:
    if c.learner.optimizer.warmup_steps <= c.run.max_steps:
        return None
    return (
        f"learner.optimizer.warmup_steps {c.learner.optimizer.warmup_steps} is longer than "
        f"run.max_steps {c.run.max_steps}"
    )


def decay_within_warmup(c: "RunConfig") -> str | None:
    settings, num_steps = c.learner.optimizer, c.run.max_steps
    num_warmup = settings.num_warmup_steps(num_steps)
    num_decay = settings.num_decay_steps(num_steps)
    if settings.schedule != "warmup_stable_decay" or num_warmup + num_decay <= num_steps:
        return None
    return (
        f"learner.optimizer.decay_ratio {settings.decay_ratio:g} begins within the warm-up: "
        f"{num_warmup} steps of warm-up and {num_decay} of decay are more than run.max_steps "
        f"{num_steps}"
    )


def shaped_beside_a_greedy_reward(c: "RunConfig") -> str | None:
    """The baseline of remax is a score, so what is added to the others would be in no baseline."""
    if not c.algorithm.needs_greedy_rewards:
        return None
    reward = c.algorithm.reward
    for name in _SHAPING:
        if getattr(reward, name) not in (None, 0.0, "train", "mask"):
            return (
                f"algorithm.advantage {c.algorithm.advantage} subtracts the score of a greedy "
                f"completion, which algorithm.reward.{name} does not change; leave it out, or use "
                "another advantage"
            )
    return None


def token_that_silences_its_sequence(c: "RunConfig") -> str | None:
    """geo_mean multiplies the weights of a sequence."""
    correction, weights_act = c.algorithm.rollout_is, not c.algorithm.ratio_holds_correction
    if c.algorithm.loss != "geo_mean" or correction.normalize_by == "kept":
        return None
    if not (correction.masks_tokens or (weights_act and correction.weighs_tokens_zero)):
        return None
    return (
        "algorithm.loss geo_mean multiplies the weights of a sequence, and a token that "
        "algorithm.rollout_is gives weight 0 would silence all of it; set "
        "algorithm.rollout_is.normalize_by=kept, which leaves that token out"
    )


def warmup_without_a_critic(c: "RunConfig") -> str | None:
    warmup = c.algorithm.value.critic_warmup
    if not warmup or (c.algorithm.needs_values and warmup < c.run.max_steps):
        return None
    if not c.algorithm.needs_values:
        return (
            f"algorithm.value.critic_warmup {warmup} has no critic to warm up: "
            f"algorithm.advantage is {c.algorithm.advantage}; only gae has one"
        )
    return (
        f"algorithm.value.critic_warmup {warmup} leaves none of run.max_steps {c.run.max_steps} "
        "to the policy"
    )


def evaluation_without_a_model(c: "RunConfig") -> str | None:
    if not c.run.evaluate or "hf_model" in c.learner.checkpoint.contents:
        return None
    return (
        "run.evaluate scores the Hugging Face folder in the last checkpoint, and "
        "learner.checkpoint.contents has no hf_model: add it, or set run.evaluate=false"
    )
