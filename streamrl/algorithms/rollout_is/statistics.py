"""Mergeable statistics from which the rollout-IS metrics are computed.

A mean of means is wrong, and so is a mean of percentiles. Shards therefore exchange sums, extremes,
moments and a histogram, all float64. Invariant: the merged statistics of N uneven shards give the
metrics of the whole (percentiles within half a percent, from a histogram of the log-ratio).

The level is the unit that has one weight (`algorithm.rollout_is.level`). The catalogue
(`streamrl.metrics`) says for each metric what its sum is divided by, or which extreme is kept.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.algorithms.moments import Moments
from streamrl.algorithms.sequences import Sequences, to_device
from streamrl.config.algorithm.rollout_is import RolloutISSettings
from streamrl.metrics import CATALOGUE, QUANTILES, STALENESS_BUCKETS, STALENESS_EDGES, Merge, metric


class WeightLevel:
    """The unit that has one weight: a token, or a sequence, which counts once per token."""

    def __init__(self, config: RolloutISSettings, sequences: Sequences) -> None:
        self.name = config.level
        self.by_token = config.level == "token"
        self.sequences = sequences
        self.counts = None if self.by_token else sequences.lengths.double()

    def aggregate(self, log_ratio: Tensor, log_ratio_sums: Tensor) -> Tensor:
        """The log-weight of each unit."""
        match self.name:
            case "token":
                return log_ratio
            case "sequence":
                return log_ratio_sums
            case _:
                return log_ratio_sums / self.sequences.lengths

    def total(self, values: Tensor) -> Tensor:
        """Sum over tokens of a value per unit."""
        return values.sum() if self.counts is None else torch.dot(values.double(), self.counts)

    def to_tokens(self, values: Tensor) -> Tensor:
        return values if self.by_token else self.sequences.expand(values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self.sequences.mean(values) if self.by_token else values

    def of_sequence(self, per_sequence: Tensor) -> Tensor:
        return self.sequences.expand(per_sequence) if self.by_token else per_sequence


SAFETY_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp; exp(20) is 4.9e8."""

SEQUENCE_ESS = "mismatch/sequence_eff_sample_size"
"""Effective sample size over the number of sequences, from unbounded ratios of sequences."""

RESCORED = "mismatch/rescored_frac"

_NAMES = (name for row in CATALOGUE for name in row.names())
_OF_WEIGHTS = frozenset(name for name in _NAMES if "/rollout_is_" in name)
_OF_APPLIED = frozenset(name for name in _OF_WEIGHTS if "/rollout_is_applied_" in name)

_BINS_PER_NAT = 100
_NUM_BINS = int(2 * SAFETY_BOUND) * _BINS_PER_NAT + 1


@dataclass(frozen=True, eq=False)
class RolloutISStatistics:
    """Sufficient statistics of one shard: float64 tensors on its device.

    Names are metric names. Extremes of weights are stored as logarithms.
    """

    counts: Tensor
    """[2] finite tokens and sequences."""
    sum_names: tuple[str, ...]
    sums: Tensor
    extreme_names: tuple[str, ...]
    extremes: Tensor
    """Maxima, and negated minima, so that all merge by maximum."""
    bounded: Moments
    """Weights clamped to [L, U], over tokens: for std and effective sample size."""
    applied: Moments
    """Weights after bound and veto, over tokens."""
    applied_units: Moments
    """The same, counted once per unit instead of once per token: for batch normalization."""
    per_sequence: Moments
    """The mean raw weight of each sequence."""
    sequence_ratios: Moments
    """exp(sum d) of each sequence at every level: for `scale_lr`."""
    histogram: Tensor
    """[B] tokens per bin of the log-ratio."""
    staleness: Tensor
    """[6, 5] per bucket: tokens, sum c, sum c^2 (c: weight clamped to [L, U]), sum -d, bounded."""

    @classmethod
    def of(
        cls, counts: Tensor, sums: dict[str, Tensor], extremes: dict[str, Tensor], **others: Any
    ) -> "RolloutISStatistics":
        """Build from sums and extremes by metric name, and the other fields."""
        return cls(
            counts=counts,
            sum_names=tuple(sums),
            sums=torch.stack([value.double() for value in sums.values()]),
            extreme_names=tuple(extremes),
            extremes=torch.stack([_as_maximum(n, extremes[n].double()) for n in extremes]),
            **others,
        )

    def merge(self, other: "RolloutISStatistics") -> "RolloutISStatistics":
        """The statistics of both shards together; both must have the same config."""
        theirs = other._parts()
        return replace(self, **{n: _merged(n, own, theirs[n]) for n, own in self._parts().items()})

    def to_tensor(self) -> Tensor:
        """One float64 vector of about 4100 numbers, to be sent through a collective."""
        return torch.cat([_tensor_of(part).flatten() for part in self._parts().values()])

    def from_tensor(self, tensor: Tensor) -> "RolloutISStatistics":
        """The statistics of another shard of the same config, from its `to_tensor`."""
        parts = self._parts()
        given = tensor.split([_tensor_of(part).numel() for part in parts.values()])
        read: dict[str, Any] = {
            name: Moments.from_tensor(piece) if isinstance(part, Moments) else piece.view_as(part)
            for (name, part), piece in zip(parts.items(), given, strict=True)
        }
        return replace(self, **read)

    def merge_ranks(self, group: dist.ProcessGroup | None = None) -> "RolloutISStatistics":
        """Merge over all ranks of `group`: a collective with the same result on every rank."""
        mine = self.to_tensor()
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        return reduce(RolloutISStatistics.merge, map(self.from_tensor, gathered))

    def to_host(self) -> "RolloutISStatistics":
        """These statistics in host memory."""
        return self.from_tensor(self.to_tensor().cpu())

    def metrics(
        self, config: RolloutISSettings, percentiles: Tensor | None = None
    ) -> dict[str, float]:
        """All metrics by their public names.

        Args:
            percentiles: [5] exact values; by default they are read off the histogram.
        """
        if percentiles is None:
            bins = torch.arange(_NUM_BINS, dtype=torch.float64, device=self.histogram.device)
            centers = (bins - _NUM_BINS // 2) / _BINS_PER_NAT
            percentiles = weight_percentiles(centers, self.histogram)
        named = self.to_host()._named(config, percentiles.cpu())
        return {name: float(value) for name, value in named.items()}

    def _named(self, config: RolloutISSettings, percentiles: Tensor) -> dict[str, Tensor]:
        num_tokens, num_sequences = self.counts
        if num_tokens == 0:
            return {}
        sums = dict(zip(self.sum_names, self.sums, strict=True))
        divisors = {
            Merge.TOKENS: num_tokens,
            Merge.SEQUENCES: num_sequences,
            Merge.LEVEL: num_sequences if config.level == "sequence" else num_tokens,
            Merge.RESCORED: sums.get(RESCORED, num_tokens),
        }
        ess = {SEQUENCE_ESS: self.sequence_ratios.effective_sample_size}
        means = {
            name: value / divisor
            for name, value in sums.items()
            if (divisor := divisors[metric(name).merge]) > 0
        }
        of_extremes = zip(self.extreme_names, self.extremes, strict=True)
        extremes = {name: _as_maximum(name, value) for name, value in of_extremes}
        distribution = self._distribution(config, extremes, percentiles)
        named = ess | means | extremes | distribution
        of_none = _OF_WEIGHTS if config.threshold is None else _OF_APPLIED
        hidden = frozenset[str]() if config.applies_weights else of_none
        return {k: v for k, v in named.items() if k not in hidden} | self._by_staleness()

    def _distribution(
        self, config: RolloutISSettings, extremes: dict[str, Tensor], percentiles: Tensor
    ) -> dict[str, Tensor]:
        """The metrics of the spread of the weights."""
        floor = -SAFETY_BOUND if config.level == "token" else -torch.inf
        log_min, log_max, seq_min, seq_max = (
            extremes[f"mismatch/rollout_is_{name}"] for name in ("min", "max", "seq_min", "seq_max")
        )
        deviation = torch.maximum((seq_max - 1).abs(), (seq_min - 1).abs())
        named = dict(zip(QUANTILES, percentiles, strict=True))
        return {
            "mismatch/rollout_is_min": log_min.clamp(min=floor).exp(),
            "mismatch/rollout_is_max": log_max.clamp(max=SAFETY_BOUND).exp(),
            "mismatch/rollout_is_std": self.bounded.variance(ddof=0).sqrt(),
            "mismatch/rollout_is_eff_sample_size": self.bounded.effective_sample_size,
            "mismatch/rollout_is_applied_mean": self.applied.mean,
            "mismatch/rollout_is_applied_eff_sample_size": self.applied.effective_sample_size,
            "mismatch/rollout_is_seq_mean": self.per_sequence.mean,
            "mismatch/rollout_is_seq_std": self.per_sequence.variance(ddof=1).sqrt(),
            "mismatch/rollout_is_seq_max_deviation": deviation,
        } | {f"mismatch/rollout_is_{name}": value for name, value in named.items()}

    def _by_staleness(self) -> dict[str, Tensor]:
        """The cost of lag: metrics for each staleness bucket that has tokens."""
        return {
            f"mismatch/staleness_{bucket}/{name}": value
            for bucket, (count, first, second, kl, bounded) in zip(
                STALENESS_BUCKETS, self.staleness, strict=True
            )
            if count > 0
            for name, value in {
                "token_fraction": count / self.staleness[:, 0].sum(),
                "eff_sample_size": first.square() / (count * second),
                "kl": kl / count,
                "clipped_fraction": bounded / count,
            }.items()
        }

    def _parts(self) -> dict[str, Tensor | Moments]:
        """The numeric fields."""
        names = (field.name for field in fields(self) if not field.name.endswith("_names"))
        return {name: getattr(self, name) for name in names}


def _as_maximum(name: str, extreme: Tensor) -> Tensor:
    """Negate the extreme if the metric of this name is a minimum; its own inverse."""
    return extreme if metric(name).merge is Merge.MAX else -extreme


def _merged(name: str, ours: Any, theirs: Any) -> Any:
    """Merge the values of the field with this name."""
    if isinstance(ours, Moments):
        return ours.merge(theirs)
    return torch.maximum(ours, theirs) if name == "extremes" else ours + theirs


def _tensor_of(part: Tensor | Moments) -> Tensor:
    return part.to_tensor() if isinstance(part, Moments) else part


def log_ratio_histogram(log_ratio: Tensor, counts: Tensor | None) -> Tensor:
    """[B] number of tokens per bin of the log-ratio; bins of 0.01 nat, one centered at 0."""
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    bins = clamped.mul_(_BINS_PER_NAT).round_().add_(_NUM_BINS // 2)
    found = log_ratio.new_zeros(_NUM_BINS, dtype=torch.float64)
    each = found.new_ones(()).expand(len(bins)) if counts is None else counts.double()
    # Not `bincount`: it reads the largest bin, for which the host would wait on a GPU.
    return found.index_add_(0, bins.long(), each)


def weight_percentiles(log_weights: Tensor, counts: Tensor | None) -> Tensor:
    """[5] percentiles of exp(log_weights [N]), each counted `counts` [N] times.

    Interpolates linearly between neighbors, as numpy and torch.quantile do. Without counts,
    `log_weights` may be sorted in place.
    """
    if counts is None and log_weights.device.type == "cpu":
        # numpy's vectorized sort is twenty times faster than torch's.
        log_weights.numpy().sort()
        ordered, total = log_weights, len(log_weights)
    elif counts is None:
        ordered, total = log_weights.sort().values, len(log_weights)
    else:
        ordered, order = log_weights.sort()
        ends = counts[order].cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
    if not total:
        return torch.full((len(QUANTILES),), torch.nan, dtype=torch.float64)
    quantiles = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    position = (quantiles * (total - 1)).to(log_weights.device)
    ranks = torch.stack([position.floor(), position.ceil()])
    picked = ranks.long() if counts is None else torch.searchsorted(ends, ranks, right=True)
    low, high = ordered[picked].double().clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    return torch.lerp(low, high, position.frac())


def largest(values: Tensor) -> Tensor:
    """The maximum as a scalar; minus infinity, which merges neutrally, if there are no values."""
    return values.max() if len(values) else values.new_tensor(-torch.inf)


def smallest(values: Tensor) -> Tensor:
    """The minimum as a scalar; infinity if there are no values."""
    return values.min() if len(values) else values.new_tensor(torch.inf)


def mismatch_sums(
    log_ratio: Tensor, log_ratio_sums: Tensor, train_sums: Tensor, sequences: Sequences
) -> dict[str, Tensor]:
    """Sums for the metrics of the distance between the two policies, before any correction."""
    ratio = finite_exp(log_ratio)
    train = train_sums / sequences.lengths
    behind = -log_ratio_sums / sequences.lengths
    rollout = train + behind
    bound = SAFETY_BOUND
    return {
        "mismatch/mismatch_kl": -log_ratio_sums.sum(),
        "mismatch/mismatch_k3_kl": (ratio - 1).sub_(log_ratio).sum(),
        "mismatch/chi2_token": ratio.clamp(max=math.exp(bound)).square_().sub_(1).sum(),
        "mismatch/chi2_seq": (2 * log_ratio_sums.clamp(-bound, bound)).expm1_().sum(),
        "mismatch/mismatch_training_ppl": finite_exp(-train).sum(),
        "mismatch/mismatch_training_log_ppl": -train.sum(),
        "mismatch/mismatch_rollout_ppl": finite_exp(-rollout).sum(),
        "mismatch/mismatch_rollout_log_ppl": -rollout.sum(),
        "mismatch/mismatch_log_ppl_diff": behind.sum(),
        "mismatch/mismatch_log_ppl_abs_diff": behind.abs().sum(),
        "mismatch/mismatch_ppl_ratio": finite_exp(behind).sum(),
    }


def raw_sums(
    raw: Tensor,
    log_weights: Tensor,
    sequence_weights: Tensor,
    level: WeightLevel,
    config: RolloutISSettings,
) -> dict[str, Tensor]:
    """Sums for the mean raw weight and the shares of weights beyond the bounds.

    The sequence level compares log-weights and counts sequences, the others count tokens, as in
    verl.
    """
    lower, upper = config.lower, math.inf if config.threshold is None else config.threshold
    if config.level == "sequence":
        log_lower = math.log(lower) if lower > 0 else -math.inf
        high, low = (log_weights > math.log(upper)).sum(), (log_weights < log_lower).sum()
    else:
        high, low = level.total(raw > upper), level.total(raw < lower)
    return {
        "mismatch/rollout_is_mean": level.total(raw),
        "mismatch/rollout_is_ratio_fraction_high": high,
        "mismatch/rollout_is_ratio_fraction_low": low,
        "mismatch/rollout_is_seq_fraction_high": (sequence_weights > upper).sum(),
        "mismatch/rollout_is_seq_fraction_low": (sequence_weights < lower).sum(),
    }


def clip_sums(changed: Tensor, level: WeightLevel) -> dict[str, Tensor]:
    return {
        "mismatch/rollout_is_clipped_fraction": level.total(changed),
        "mismatch/rollout_is_seq_clipped_fraction": (level.sequence_mean(changed) > 0).sum(),
    }


def staleness_sums(
    staleness: Tensor | None,
    log_ratio: Tensor,
    clipped: Tensor,
    changed: Tensor,
    level: WeightLevel,
) -> Tensor:
    """[6, 5] sums per bucket of |staleness|; see `RolloutISStatistics.staleness`."""
    if staleness is None:
        return log_ratio.new_zeros(len(STALENESS_BUCKETS), 5)
    edges = to_device(torch.tensor(STALENESS_EDGES), staleness.device)
    buckets = torch.arange(len(STALENESS_BUCKETS), device=staleness.device)
    member = (torch.bucketize(staleness.abs(), edges) == buckets[:, None]).double()
    weight = level.to_tokens(clipped)
    changed = level.to_tokens(changed.double())
    one = torch.ones_like(weight)
    return member @ torch.stack([one, weight, weight.square(), -log_ratio, changed], dim=1)


def finite_exp(values: Tensor) -> Tensor:
    """exp, bounded by e^80 to stay finite in float32."""
    return values.clamp(max=80.0).exp_()
