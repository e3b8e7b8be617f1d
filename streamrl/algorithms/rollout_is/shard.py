"""One shard of rollout importance sampling: its weights, and the statistics of its metrics.

Invariant: everything is computed in float64, over sequences that are finite and not empty.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamrl.algorithms.moments import Moments
from streamrl.algorithms.rollout_is.rejection import reject
from streamrl.algorithms.rollout_is.statistics import (
    SAFETY_BOUND,
    STALENESS_BUCKETS,
    STALENESS_EDGES,
    RolloutISStatistics,
    largest,
    log_ratio_histogram,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings


@dataclass(frozen=True, eq=False)
class Shard:
    """`log_weights` are [R] at token level, else [S] with `counts` [S] tokens each."""

    weights: Tensor
    keep: Tensor
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
        statistics=replace(shard.statistics, sums=sums_),
    )


class _Level:
    """The unit that has one weight: a token, or a sequence with as many votes as tokens."""

    def __init__(self, config: RolloutISSettings, sequences: Sequences) -> None:
        self.name = config.level
        self.by_token = config.level == "token"
        self.sequences = sequences
        self.counts = None if self.by_token else sequences.lengths.double()

    def aggregate(self, log_ratio: Tensor, log_ratio_sums: Tensor) -> Tensor:
        """Logarithm of the unit's weight."""
        match self.name:
            case "token":
                return log_ratio
            case "sequence":
                return log_ratio_sums
            case _:
                return log_ratio_sums / self.sequences.lengths

    def total(self, values: Tensor) -> Tensor:
        """Sum over tokens."""
        return values.sum() if self.counts is None else torch.dot(values.double(), self.counts)

    def to_tokens(self, values: Tensor) -> Tensor:
        return values if self.by_token else self.sequences.expand(values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self.sequences.mean(values) if self.by_token else values

    def of_sequence(self, per_sequence: Tensor) -> Tensor:
        return self.sequences.expand(per_sequence) if self.by_token else per_sequence


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
    level = _Level(config, sequences)
    ratio = _exp(log_ratio)
    mismatch = _mismatch(log_ratio, ratio, log_ratio_sums, train_sums, sequences)
    log_weights = level.aggregate(log_ratio, log_ratio_sums)
    bound = math.exp(SAFETY_BOUND)
    raw = (ratio if level.by_token else _exp(log_weights)).clamp_(1 / bound, bound)
    upper = math.inf if config.threshold is None else config.threshold
    clipped = raw.clamp(config.lower, upper)
    changed = raw != clipped if config.zeroes_outside else raw > upper
    vetoed, veto = _veto(log_ratio, sequences, config)
    weights = torch.where(changed, 0.0 if config.zeroes_outside else upper, raw)
    weights.masked_fill_(level.of_sequence(vetoed), 0.0)
    rejection = reject(log_ratio, sequences, config.rejection)
    per_sequence = level.sequence_mean(raw)
    sums = (
        mismatch
        | _raw_sums(raw, log_weights, per_sequence, level, config)
        | veto
        | (_clip_sums(changed, level) if config.zeroes_outside else {})
        | {"token/rollout_is_applied_zero_fraction": level.total(weights == 0)}
        | rejection.sums
    )
    behind = -log_ratio_sums / sequences.lengths
    maxima = {
        "mismatch_log_ppl_diff_max": largest(behind),
        "-mismatch_log_ppl_diff_min": largest(-behind),
        "_log_max": largest(log_weights),
        "-_log_min": largest(-log_weights),
        "_seq_max": largest(per_sequence),
        "-_seq_min": largest(-per_sequence),
    } | rejection.maxima
    statistics = RolloutISStatistics(
        sum_names=tuple(sums),
        sums=torch.stack([value.double() for value in sums.values()]),
        max_names=tuple(maxima),
        maxima=torch.stack([value.double() for value in maxima.values()]),
        bounded=Moments.of(clipped, level.counts),
        applied=Moments.of(weights, level.counts),
        applied_units=Moments.of(weights),
        per_sequence=Moments.of(per_sequence),
        histogram=log_ratio_histogram(log_weights, level.counts),
        staleness=_by_staleness(staleness, log_ratio, clipped, changed, level),
    )
    return Shard(
        weights=level.to_tokens(weights.to(dtype)),
        keep=rejection.keep,
        log_weights=log_weights.to(dtype),
        counts=None if level.by_token else sequences.lengths,
        statistics=statistics,
    )


def _veto(
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


def _mismatch(
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
        "sequence/mismatch_training_ppl": _exp(-train).sum(),
        "sequence/mismatch_training_log_ppl": -train.sum(),
        "sequence/mismatch_rollout_ppl": _exp(-rollout).sum(),
        "sequence/mismatch_rollout_log_ppl": -rollout.sum(),
        "sequence/mismatch_log_ppl_diff": behind.sum(),
        "sequence/mismatch_log_ppl_abs_diff": behind.abs().sum(),
        "sequence/mismatch_ppl_ratio": _exp(behind).sum(),
    }


def _raw_sums(
    raw: Tensor,
    log_weights: Tensor,
    sequence_weights: Tensor,
    level: _Level,
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


def _clip_sums(changed: Tensor, level: _Level) -> dict[str, Tensor]:
    return {
        "token/rollout_is_clipped_fraction": level.total(changed),
        "sequence/rollout_is_seq_clipped_fraction": (level.sequence_mean(changed) > 0).sum(),
    }


def _by_staleness(
    staleness: Tensor | None, log_ratio: Tensor, clipped: Tensor, changed: Tensor, level: _Level
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


def _exp(values: Tensor) -> Tensor:
    """exp that stays finite: beyond e^80 float32 overflows."""
    return values.clamp(max=80.0).exp_()


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
