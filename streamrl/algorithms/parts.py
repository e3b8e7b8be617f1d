"""Batches in parts: some groups are trained while others of the batch are still being sampled.

With the settings that accept parts, the terms of a group depend on that group alone, and only the
denominator of the loss, which all terms share, depends on the batch. The gradient of the parts so
far, times the old denominator divided by the new one, is then their share of the gradient of the
larger batch.
"""

from dataclasses import dataclass

from streamrl.algorithms.losses import BatchTotals, denominator
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.losses import SEQUENCE_MEAN_LOSSES
from streamrl.config.algorithm.rewards import RewardShapingSettings
from streamrl.metrics import Merge, find

_ADVANTAGES = frozenset(
    {"reinforce", "grpo", "dr_grpo", "grpo_passk", "rloo", "remax", "opo", "opob"}
    | {"otb", "maxrl", "gigpo"}
)
_LOSSES = frozenset(
    {"ppo", "gspo", "luspo", "gpg", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo"}
    | {"topr", "reinforce", "dro"}
)


def accepts_parts(config: AlgorithmSettings, num_updates: int = 1) -> bool:
    """Whether training a batch in parts makes the same update as training it as a whole.

    It does not if a group's terms depend on other groups (normalization over the batch, state that
    each batch updates), with a user's own loss or advantage, if two terms of the loss have
    different denominators, with several updates (mini-batches are drawn from the whole batch), or
    if the weights come from a pass before the update (their metrics are those of the whole batch).
    """
    weights, correction = config.sample_weight, config.rollout_is
    is_over_the_batch = (
        config.advantage_config.whiten
        or _shapes_over_the_batch(config.reward)
        or weights.difficulty
        or weights.length
        or config.pf_ppo is not None
        or config.kl_reward.coef > 0
        or config.echo_coef > 0
        or correction.batch_normalize
        or correction.normalize_by == "kept"
        or correction.second_moment is not None
        or (config.needs_ratios and config.proximal == "recompute")
    )
    return (
        num_updates == 1
        and config.advantage in _ADVANTAGES
        and config.loss in _LOSSES
        and not is_over_the_batch
        and _has_one_denominator(config)
    )


@dataclass(frozen=True)
class Rescaling:
    """The factors by which the share of earlier parts falls when the batch grows by a part."""

    loss: float
    """For the gradient and the metrics that are terms of the loss."""
    mean: float
    """For the metrics that are means over tokens."""

    @classmethod
    def of(cls, config: AlgorithmSettings, old: BatchTotals, new: BatchTotals) -> "Rescaling":
        numbers = config.loss_config
        mode = SEQUENCE_MEAN_LOSSES.get(config.loss, numbers.loss_agg_mode)
        return cls(
            loss=denominator(mode, old, numbers) / denominator(mode, new, numbers),
            mean=denominator("token-mean", old) / denominator("token-mean", new),
        )

    def of_metric(self, name: str) -> float:
        return self.loss if find(name).merge is Merge.LOSS else self.mean


def _shapes_over_the_batch(config: RewardShapingSettings) -> bool:
    if config.agentic is not None:
        compares_siblings = config.agentic.grouping == "state"
    else:
        compares_siblings = {config.norm_mean, config.norm_std}.isdisjoint({"batch", "running"})
    return config.whiten or not compares_siblings


def _has_one_denominator(config: AlgorithmSettings) -> bool:
    """Whether the other terms are divided by the same number as the policy loss."""
    by_sequences = ("seq-mean-token-mean", "seq-mean-token-sum")
    return (
        config.loss not in SEQUENCE_MEAN_LOSSES
        or config.loss_config.loss_agg_mode in by_sequences
        or not config.has_other_terms
    )
