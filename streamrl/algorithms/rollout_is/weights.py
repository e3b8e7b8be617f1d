"""Weights, kept tokens and metrics of one batch: the entry of rollout importance sampling.

M2PO keeps the second moment of log-ratios small by masking the largest of them. A token is harmful
if its update moves the policy further from the behavior policy: A > 0 and d > 0, or A < 0 and d <
0, with d = log(train / behavior). Of the harmful tokens of a batch those with the largest d^2 are
masked until the mean of d^2 over the remaining ones is within the limit. Masked tokens still count
in the denominators of the loss, under `normalize_by: all`. Source: M2PO (Zheng, Zhao, Chen, arXiv
2510.01161, algorithm 1; github.com/Infini-AI-Lab/M2PO, which has the same tokens and mean, and
clips where the paper masks).

The mask does not depend on the order of the tokens; of equally large ones all are
masked or none. A batch without harmful tokens, such as one on policy, keeps all.

`Shard`: everything is computed in float64, over sequences that are finite and not empty.

On a GPU nothing here makes the host wait, until the metrics are read: shapes depend on lengths that
the host knows.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from streamrl.algorithms.moments import Moments
from streamrl.algorithms.rollout_is.rejection import reject, split, veto
from streamrl.algorithms.rollout_is.statistics import (
    SAFETY_BOUND,
    RolloutISStatistics,
    WeightLevel,
    clip_sums,
    finite_exp,
    largest,
    log_ratio_histogram,
    mismatch_sums,
    raw_sums,
    smallest,
    staleness_sums,
    weight_percentiles,
)
from streamrl.algorithms.sequences import Sequences, require_rows, to_device
from streamrl.config.algorithm.rollout_is import RolloutISSettings
from streamrl.metrics import Merge, metric


def bound_second_moment(
    log_ratio: Tensor, advantages: Tensor, counted: Tensor, limit: float
) -> tuple[Tensor, dict[str, float]]:
    """The mask [R] bool for a whole batch, and the metrics: the mean of d^2 over harmful tokens
    before the masking, and the share of all tokens that is masked.

    Args:
        log_ratio: [R] d; may be non-finite where `counted` is false.
        advantages: [R]; 0 for tokens that are not trained.
        counted: [R] bool, false for tokens that are taken out already.
        limit: on the mean of d^2.
    """
    is_harmful = counted & (advantages.sign() * log_ratio > 0)
    squares = log_ratio[is_harmful].double().square()
    keep = torch.ones_like(counted)
    keep[is_harmful] = squares < _smallest_masked(squares, limit)
    return keep, {
        "mismatch/second_moment": float(squares.sum()) / max(len(squares), 1),
        "mismatch/second_moment_masked_fraction": int((~keep).sum()) / max(len(keep), 1),
    }


def _smallest_masked(squares: Tensor, limit: float) -> float:
    """The smallest of these [N] that has to go; infinity if all may stay."""
    ascending = squares.sort().values
    counts = torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    # Means of the smallest 1, 2, ... N: they never fall.
    too_large = (ascending.cumsum(0) / counts > limit).nonzero()
    return float(ascending[too_large[0]]) if len(too_large) else torch.inf


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
    rescored: Tensor | None = None,
) -> Shard:
    """Measure the sequences of finite tokens; the others weigh 0 and are in no statistic.

    On a GPU the others are measured as if they had no mismatch, and are in no denominator.
    """
    dtype = torch.promote_types(train.dtype, torch.float32)
    wide = train.double()
    log_ratio = wide - behavior
    mismatch = None if rescored is None else rescored.double() - behavior
    sums = sequences.sum(log_ratio), sequences.sum(wide)
    finite = sums[0].isfinite() & sums[1].isfinite()
    if log_ratio.is_cuda or finite.all():
        return _without_waiting(
            log_ratio, sums, finite, sequences, config, staleness, mismatch, dtype
        )
    tokens = sequences.expand(finite)
    shard = measure_shard(
        train[tokens],
        behavior[tokens],
        Sequences.from_lengths(sequences.lengths[finite]),
        config,
        None if staleness is None else staleness[tokens],
        None if rescored is None else rescored[tokens],
    )
    counts = shard.statistics.counts.clone()
    counts[2] = (~finite).sum()
    return replace(
        shard,
        weights=shard.weights.new_zeros(len(tokens)).masked_scatter_(tokens, shard.weights),
        keep=tokens.masked_scatter(tokens, shard.keep),
        vetoed=torch.zeros_like(tokens).masked_scatter_(tokens, shard.vetoed),
        statistics=replace(shard.statistics, counts=counts),
    )


def _without_waiting(
    log_ratio: Tensor,
    sums: tuple[Tensor, Tensor],
    finite: Tensor,
    sequences: Sequences,
    config: RolloutISSettings,
    staleness: Tensor | None,
    mismatch: Tensor | None,
    dtype: torch.dtype,
) -> Shard:
    """`measure_shard` from what it has computed; `finite` is [S] bool."""
    tokens = sequences.expand(finite)
    nonempty = (sequences.lengths > 0).nonzero()[:, 0]
    measured = Sequences.from_lengths(sequences.lengths[nonempty]).to(log_ratio.device)
    chosen = to_device(nonempty, log_ratio.device)
    ratios, train = (torch.where(finite, column, 0.0)[chosen] for column in sums)
    log_ratio = torch.where(tokens, log_ratio, 0.0)
    counts = torch.stack([tokens.sum(), finite[chosen].sum(), (~finite).sum()]).double()
    shard = _measure(log_ratio, ratios, train, measured, counts, config, staleness, mismatch, dtype)
    weights = torch.where(tokens, shard.weights, 0.0)
    return replace(shard, weights=weights, keep=shard.keep & tokens)


def _measure(
    log_ratio: Tensor,
    log_ratio_sums: Tensor,
    train_sums: Tensor,
    sequences: Sequences,
    counts: Tensor,
    config: RolloutISSettings,
    staleness: Tensor | None,
    engine: Tensor | None,
    dtype: torch.dtype,
) -> Shard:
    """All of one shard whose sequences are finite and not empty. Inputs are float64."""
    level = WeightLevel(config, sequences)
    log_weights = level.aggregate(log_ratio, log_ratio_sums)
    raw = _within_safety(log_weights)
    factors = split(log_ratio, engine, config)
    shrunk = raw if factors.excess is None else _weights_of(log_ratio - factors.excess, level)
    upper = math.inf if config.threshold is None else config.threshold
    clipped = shrunk.clamp(config.lower, upper)
    changed = shrunk != clipped if config.zeroes_outside else shrunk > upper
    vetoed, veto_sums = veto(log_ratio, sequences, config)
    weights = torch.where(changed, 0.0 if config.zeroes_outside else upper, shrunk)
    weights.masked_fill_(level.of_sequence(vetoed), 0.0)
    rejection = reject(log_ratio, sequences, config.rejection)
    per_sequence = level.sequence_mean(raw)
    sums = (
        mismatch_sums(log_ratio, log_ratio_sums, train_sums, sequences)
        | raw_sums(raw, log_weights, per_sequence, level, config)
        | veto_sums
        | (clip_sums(changed, level) if config.zeroes_outside else {})
        | {"mismatch/rollout_is_applied_zero_fraction": level.total(weights == 0)}
        | rejection.sums
        | factors.sums
    )
    behind = -log_ratio_sums / sequences.lengths
    maxima, minima = _extremes(behind, log_weights, per_sequence, rejection.extremes)
    statistics = RolloutISStatistics(
        counts=counts,
        sum_names=tuple(sums),
        sums=_stacked(sums),
        max_names=tuple(maxima),
        maxima=_stacked(maxima),
        min_names=tuple(minima),
        minima=_stacked(minima),
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
        keep=rejection.keep if factors.keep is None else rejection.keep & factors.keep,
        vetoed=sequences.expand(vetoed),
        log_weights=log_weights.to(dtype),
        counts=None if level.by_token else sequences.lengths,
        statistics=statistics,
    )


def _weights_of(log_ratio: Tensor, level: WeightLevel) -> Tensor:
    """Of each unit of the level, before its bound."""
    return _within_safety(level.aggregate(log_ratio, level.sequences.sum(log_ratio)))


def _within_safety(log_weights: Tensor) -> Tensor:
    """Their exponential."""
    bound = math.exp(SAFETY_BOUND)
    return finite_exp(log_weights).clamp_(1 / bound, bound)


def _extremes(
    behind: Tensor, log_weights: Tensor, per_sequence: Tensor, of_rules: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Maxima and minima, as `RolloutISStatistics` has them."""
    named = {
        "mismatch/mismatch_log_ppl_diff_max": largest(behind),
        "mismatch/mismatch_log_ppl_diff_min": smallest(behind),
        "mismatch/rollout_is_max": largest(log_weights),
        "mismatch/rollout_is_min": smallest(log_weights),
        "mismatch/rollout_is_seq_max": largest(per_sequence),
        "mismatch/rollout_is_seq_min": smallest(per_sequence),
        **of_rules,
    }
    return [
        {name: value for name, value in named.items() if metric(name).merge is merge}
        for merge in (Merge.MAX, Merge.MIN)
    ]


def _stacked(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values.values()])


_CPU_CHUNK_TOKENS = 1 << 16
"""So many float64 scratch values stay in a core's second-level cache."""


@dataclass(frozen=True, eq=False)
class RolloutIS:
    """Result of `rollout_is_weights`."""

    weights: Tensor | None
    """[R] importance weights, or None where they are off or not applied."""
    keep: Tensor
    """[R] bool; false: rejected by a rule or by the limit on the second moment, or of a sequence
    with non-finite log-probabilities."""
    measure: Callable[[], dict[str, float]] = dict
    statistics: RolloutISStatistics | None = None
    """What the metrics were computed from, to be merged over micro-batches and ranks."""
    vetoed: Tensor | None = None
    """[R] bool; true: of a sequence that the veto gives weight 0. None where weights are off."""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Under their public names; waits for the device."""
        return self.measure()

    @property
    def accepted(self) -> Tensor:
        """[R] bool; tokens that neither a rule nor the veto takes out, whatever their weight."""
        return self.keep if self.vetoed is None else self.keep & ~self.vetoed

    def loss_terms(self, config: RolloutISSettings) -> tuple[Tensor | None, Tensor | None]:
        """(importance_weights, loss_mask) [R] for a LossInput, as `normalize_by` asks.

        `all`: tokens that do not contribute weigh 0 and still count in the denominators.
        `kept`: they are masked out and do not count.
        """
        if config.normalize_by == "kept":
            mask = self.keep if self.weights is None else self.keep & (self.weights != 0)
            return self.weights, mask
        if self.weights is None and self._keeps_all:
            return None, None
        weights = self.keep.float() if self.weights is None else self.weights * self.keep
        return weights, None

    @property
    def _keeps_all(self) -> bool:
        """As far as the host can say without waiting for a GPU."""
        return self.statistics is None or (not self.keep.is_cuda and bool(self.keep.all()))


def rollout_is_weights(
    train_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    config: RolloutISSettings,
    staleness: Tensor | None = None,
    advantages: Tensor | None = None,
    rescored_logprobs: Tensor | None = None,
) -> RolloutIS:
    """Weights, kept tokens and metrics of one batch, or of one shard of it.

    Args:
        train_logprobs: [R] nats, under the policy that the loss is anchored to.
        behavior_logprobs: [R] nats, under the distribution actually sampled from.
        staleness: [R] versions between sampling and training; adds metrics per bucket.
        advantages: [R], 0 for tokens that are not trained; `second_moment` needs them, and a whole
            batch.
        rescored_logprobs: [R] nats, NaN where they are not known; see `split`.

    Returns:
        RolloutIS; weights are float32, or float64 for float64 input. Where the configuration is
        off: weights None, no metrics.
    """
    require_rows(
        sequences.num_tokens,
        train_logprobs=train_logprobs,
        behavior_logprobs=behavior_logprobs,
        staleness=staleness,
        advantages=advantages,
        rescored_logprobs=rescored_logprobs,
    )
    if config.is_off:
        return RolloutIS(None, torch.ones_like(train_logprobs, dtype=torch.bool))
    on_cpu = train_logprobs.device.type == "cpu"
    with torch.no_grad(), _single_thread() if on_cpu else nullcontext():
        chunk = _CPU_CHUNK_TOKENS if on_cpu else sequences.num_tokens
        shards = [
            measure_shard(
                train_logprobs[tokens],
                behavior_logprobs[tokens],
                sequences[rows],
                config,
                None if staleness is None else staleness[tokens],
                None if rescored_logprobs is None else rescored_logprobs[tokens],
            )
            for rows, tokens in sequences.chunks(chunk)
        ]
        keep = torch.cat([shard.keep for shard in shards])
        if config.second_moment is None:
            return _assemble(shards, config, keep, {})
        if advantages is None:
            raise ValueError("second_moment: needs the advantages")
        log_ratio = train_logprobs.double() - behavior_logprobs
        counted = torch.cat([_counted(shard, config) for shard in shards])
        bounded, metrics = bound_second_moment(log_ratio, advantages, counted, config.second_moment)
        return _assemble(shards, config, keep & bounded, metrics)


def _counted(shard: Shard, config: RolloutISSettings) -> Tensor:
    """[R] of the shard: whether the token is trained, as far as the other rules go."""
    return shard.keep & ~shard.vetoed if config.applies_weights else shard.keep


def _assemble(
    shards: list[Shard],
    config: RolloutISSettings,
    keep: Tensor,
    more: Mapping[str, float],
) -> RolloutIS:
    statistics = reduce(RolloutISStatistics.merge, [shard.statistics for shard in shards])
    weights = vetoed = None
    if config.applies_weights:
        weights = torch.cat([shard.weights for shard in shards])
        vetoed = torch.cat([shard.vetoed for shard in shards])
        if config.batch_normalize:
            factor = _mean_weight(statistics, config)
            weights = weights / factor
            more = {**more, "mismatch/rollout_is_batch_norm_factor": factor}

    def measure() -> dict[str, float]:
        counts = [shard.counts for shard in shards if shard.counts is not None]
        log_weights = torch.cat([shard.log_weights for shard in shards])
        percentiles = weight_percentiles(log_weights, torch.cat(counts) if counts else None)
        return {**statistics.metrics(config, percentiles), **more}

    return RolloutIS(weights, keep, measure, statistics, vetoed)


def _mean_weight(statistics: RolloutISStatistics, config: RolloutISSettings) -> float:
    """What batch normalization divides by: the mean over tokens, or over sequences."""
    moments = statistics.applied if config.level == "token" else statistics.applied_units
    mean = float(moments.mean)
    return mean if mean > 1e-8 else 1.0


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run torch's CPU kernels on this thread alone.

    On chunks this small a second thread gains nothing, and where the cores are shared with another
    process every barrier between threads costs milliseconds: seconds per call instead of 15 ms.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
