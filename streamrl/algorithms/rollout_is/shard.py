"""One shard of rollout importance sampling: its weights, and the statistics of its metrics.

Invariant: everything is computed in float64, over sequences that are finite and not empty.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamrl.algorithms.moments import Moments
from streamrl.algorithms.rollout_is.level import Level
from streamrl.algorithms.rollout_is.rejection import reject
from streamrl.algorithms.rollout_is.statistics import (
    SAFETY_BOUND,
    RolloutISStatistics,
    largest,
    log_ratio_histogram,
)
from streamrl.algorithms.rollout_is.sums import (
    clip_sums,
    finite_exp,
    mismatch_sums,
    raw_sums,
    staleness_sums,
    veto,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings


@dataclass(frozen=True, eq=False)
class Shard:
    """`log_weights` are [R] at token level, else [S] with `counts` [S] tokens each."""

    weights: Tensor
    keep: Tensor
    vetoed: Tensor
    log_weights: Tensor
    counts: Tensor | None
    statistics: RolloutISStatistics


def measure_shard(
    train: Tensor,
    behavior: Tensor,
    sequences: Sequences,
    config: RolloutISSettings,
    staleness: Tensor | None,
) -> Shard:
    """Measure the sequences of finite tokens; the others weigh 0 and are in no statistic."""
    dtype = torch.promote_types(train.dtype, torch.float32)
    train = train.double()
    log_ratio = train - behavior
    sums = sequences.sum(log_ratio), sequences.sum(train)
    finite = sums[0].isfinite() & sums[1].isfinite()
    used = finite & (sequences.lengths > 0)
    measured = Sequences.from_lengths(sequences.lengths[used])
    rows = sums[0][used], sums[1][used]
    if bool(finite.all()):
        return _measure(log_ratio, *rows, measured, config, staleness, dtype)
    tokens = sequences.expand(finite)
    staleness = None if staleness is None else staleness[tokens]
    shard = _measure(log_ratio[tokens], *rows, measured, config, staleness, dtype)
    names, sums_ = shard.statistics.sum_names, shard.statistics.sums.clone()
    sums_[names.index("num_nonfinite")] = (~finite).sum()
    return replace(
        shard,
        weights=shard.weights.new_zeros(len(tokens)).masked_scatter_(tokens, shard.weights),
        keep=tokens.masked_scatter(tokens, shard.keep),
        vetoed=torch.zeros_like(tokens).masked_scatter_(tokens, shard.vetoed),
        statistics=replace(shard.statistics, sums=sums_),
    )


def _measure(
    log_ratio: Tensor,
    log_ratio_sums: Tensor,
    train_sums: Tensor,
    sequences: Sequences,
    config: RolloutISSettings,
    staleness: Tensor | None,
    dtype: torch.dtype,
) -> Shard:
    """All of one shard whose sequences are finite and not empty. Inputs are float64."""
    level = Level(config, sequences)
    ratio = finite_exp(log_ratio)
    mismatch = mismatch_sums(log_ratio, ratio, log_ratio_sums, train_sums, sequences)
    log_weights = level.aggregate(log_ratio, log_ratio_sums)
    bound = math.exp(SAFETY_BOUND)
    raw = (ratio if level.by_token else finite_exp(log_weights)).clamp_(1 / bound, bound)
    upper = math.inf if config.threshold is None else config.threshold
    clipped = raw.clamp(config.lower, upper)
    changed = raw != clipped if config.zeroes_outside else raw > upper
    vetoed, veto_sums = veto(log_ratio, sequences, config)
    weights = torch.where(changed, 0.0 if config.zeroes_outside else upper, raw)
    weights.masked_fill_(level.of_sequence(vetoed), 0.0)
    rejection = reject(log_ratio, sequences, config.rejection)
    per_sequence = level.sequence_mean(raw)
    sums = (
        mismatch
        | raw_sums(raw, log_weights, per_sequence, level, config)
        | veto_sums
        | (clip_sums(changed, level) if config.zeroes_outside else {})
        | {"token/rollout_is_applied_zero_fraction": level.total(weights == 0)}
        | rejection.sums
    )
    behind = -log_ratio_sums / sequences.lengths
    maxima = rejection.maxima | _maxima(behind, log_weights, per_sequence)
    statistics = RolloutISStatistics(
        sum_names=tuple(sums),
        sums=torch.stack([value.double() for value in sums.values()]),
        max_names=tuple(maxima),
        maxima=torch.stack([value.double() for value in maxima.values()]),
        bounded=Moments.of(clipped, level.counts),
        applied=Moments.of(weights, level.counts),
        applied_units=Moments.of(weights),
        per_sequence=Moments.of(per_sequence),
        sequence_ratios=Moments.of(log_ratio_sums.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()),
        histogram=log_ratio_histogram(log_weights, level.counts),
        staleness=staleness_sums(staleness, log_ratio, clipped, changed, level),
    )
    return Shard(
        weights=level.to_tokens(weights.to(dtype)),
        keep=rejection.keep,
        vetoed=sequences.expand(vetoed),
        log_weights=log_weights.to(dtype),
        counts=None if level.by_token else sequences.lengths,
        statistics=statistics,
    )


def _maxima(behind: Tensor, log_weights: Tensor, per_sequence: Tensor) -> dict[str, Tensor]:
    """Extremes, as `RolloutISStatistics.max_names` says."""
    return {
        "mismatch_log_ppl_diff_max": largest(behind),
        "-mismatch_log_ppl_diff_min": largest(-behind),
        "_log_max": largest(log_weights),
        "-_log_min": largest(-log_weights),
        "_seq_max": largest(per_sequence),
        "-_seq_min": largest(-per_sequence),
    }
