"""The sums of one shard that the metrics are computed from.

A key `token/x` is divided by the tokens of all shards, `sequence/x` by their sequences. Float64.
"""

import math

import torch
from torch import Tensor

from streamrl.algorithms.rollout_is.level import Level
from streamrl.algorithms.rollout_is.statistics import SAFETY_BOUND
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings
from streamrl.metrics import STALENESS_BUCKETS, STALENESS_EDGES


def veto(
    log_ratio: Tensor, sequences: Sequences, config: RolloutISSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """vetoed [S]: sequences with a token that the training policy finds all but impossible."""
    floor = -math.inf if config.veto_threshold is None else math.log(config.veto_threshold)
    catastrophic = log_ratio < floor
    count = catastrophic.sum()
    vetoed = torch.zeros(len(sequences), dtype=torch.bool, device=log_ratio.device)
    if count > 0:
        vetoed = sequences.sum(catastrophic) > 0
    return vetoed, {
        "token/rollout_is_catastrophic_token_fraction": count,
        "sequence/rollout_is_veto_fraction": vetoed.sum(),
    }


def mismatch_sums(
    log_ratio: Tensor,
    ratio: Tensor,
    log_ratio_sums: Tensor,
    train_sums: Tensor,
    sequences: Sequences,
) -> dict[str, Tensor]:
    """How far apart the two policies are, whatever is done about it. `ratio` [R] is exp(d)."""
    num_tokens = torch.tensor(sequences.num_tokens, device=log_ratio.device)
    train = train_sums / sequences.lengths
    behind = -log_ratio_sums / sequences.lengths
    rollout = train + behind
    bound = SAFETY_BOUND
    return {
        "num_tokens": num_tokens,
        "num_sequences": torch.full_like(num_tokens, len(sequences)),
        "num_nonfinite": torch.zeros_like(num_tokens),
        "token/mismatch_kl": -log_ratio_sums.sum(),
        "token/mismatch_k3_kl": (ratio - 1).sub_(log_ratio).sum(),
        "token/chi2_token": ratio.clamp(max=math.exp(bound)).square_().sub_(1).sum(),
        "sequence/chi2_seq": (2 * log_ratio_sums.clamp(-bound, bound)).expm1_().sum(),
        "sequence/mismatch_training_ppl": finite_exp(-train).sum(),
        "sequence/mismatch_training_log_ppl": -train.sum(),
        "sequence/mismatch_rollout_ppl": finite_exp(-rollout).sum(),
        "sequence/mismatch_rollout_log_ppl": -rollout.sum(),
        "sequence/mismatch_log_ppl_diff": behind.sum(),
        "sequence/mismatch_log_ppl_abs_diff": behind.abs().sum(),
        "sequence/mismatch_ppl_ratio": finite_exp(behind).sum(),
    }


def raw_sums(
    raw: Tensor,
    log_weights: Tensor,
    sequence_weights: Tensor,
    level: Level,
    config: RolloutISSettings,
) -> dict[str, Tensor]:
    """Mean weight and the shares beyond the bounds, before anything is done about them.

    Sequence level compares log weights and counts sequences, the others count tokens (as verl).
    """
    lower, upper = config.lower, math.inf if config.threshold is None else config.threshold
    if config.level == "sequence":
        scope = "sequence"
        high, low = (log_weights > math.log(upper)).sum(), (log_weights < _log(lower)).sum()
    else:
        scope = "token"
        high, low = level.total(raw > upper), level.total(raw < lower)
    return {
        "token/rollout_is_mean": level.total(raw),
        f"{scope}/rollout_is_ratio_fraction_high": high,
        f"{scope}/rollout_is_ratio_fraction_low": low,
        "sequence/rollout_is_seq_fraction_high": (sequence_weights > upper).sum(),
        "sequence/rollout_is_seq_fraction_low": (sequence_weights < lower).sum(),
    }


def clip_sums(changed: Tensor, level: Level) -> dict[str, Tensor]:
    return {
        "token/rollout_is_clipped_fraction": level.total(changed),
        "sequence/rollout_is_seq_clipped_fraction": (level.sequence_mean(changed) > 0).sum(),
    }


def staleness_sums(
    staleness: Tensor | None, log_ratio: Tensor, clipped: Tensor, changed: Tensor, level: Level
) -> Tensor:
    """[6, 5] sums per bucket; see `RolloutISStatistics.staleness`. Distance, whatever its sign."""
    if staleness is None:
        return log_ratio.new_zeros(len(STALENESS_BUCKETS), 5)
    edges = torch.tensor(STALENESS_EDGES, device=staleness.device)
    buckets = torch.arange(len(STALENESS_BUCKETS), device=staleness.device)
    member = (torch.bucketize(staleness.abs(), edges) == buckets[:, None]).double()
    weight = level.to_tokens(clipped)
    changed = level.to_tokens(changed.double())
    one = torch.ones_like(weight)
    return member @ torch.stack([one, weight, weight.square(), -log_ratio, changed], dim=1)


def finite_exp(values: Tensor) -> Tensor:
    """exp that stays finite: beyond e^80 float32 overflows."""
    return values.clamp(max=80.0).exp_()


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
