"""Weights, kept tokens and metrics of one batch: the entry point of rollout importance sampling.

A shard is measured in float64, over its finite, non-empty sequences. On a GPU nothing here makes
the host wait until the metrics are read, since shapes depend only on lengths that the host knows.
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


def bound_second_moment(
    log_ratio: Tensor, advantages: Tensor, counted: Tensor, limit: float
) -> tuple[Tensor, dict[str, float]]:
    """A mask [R] bool that limits the second moment of d = log(train / behavior), and the metrics:
    the mean of d^2 over harmful tokens before masking, and the share of tokens masked.

    A token is harmful if its update moves the policy further from the behavior policy, that is, if
    A and d have the same sign. The harmful tokens with the largest d^2 are masked until the mean of
    d^2 over the remaining ones is within the limit; of equal ones all or none (M2PO, arXiv
    2510.01161, algorithm 1; github.com/Infini-AI-Lab/M2PO chooses the same tokens, and clips them
    where the paper masks).

    Args:
        log_ratio: [R] d; may be non-finite where `counted` is false.
        advantages: [R]; 0 for tokens that are not trained.
        counted: [R] bool, false for tokens that are already rejected.
        limit: the bound on the mean of d^2.
    """
    is_harmful = counted & (advantages.sign() * log_ratio > 0)
    squares = log_ratio[is_harmful].double().square()
    ascending = squares.sort().values
    counts = torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    # The means of the smallest 1, 2, ... values never decrease.
    too_large = (ascending.cumsum(0) / counts > limit).nonzero()
    smallest_masked = float(ascending[too_large[0]]) if len(too_large) else torch.inf
    keep = torch.ones_like(counted)
    keep[is_harmful] = squares < smallest_masked
    num_finite = int(log_ratio.isfinite().sum())
    return keep, {
        "mismatch/second_moment": float(squares.sum()) / max(len(squares), 1),
        "mismatch/second_moment_masked_fraction": int((~keep).sum()) / max(num_finite, 1),
    }


@dataclass(frozen=True, eq=False)
class Shard:
    """The results of one shard. `log_weights` are [R] at token level, otherwise [S], and `counts`
    [S] then says how many tokens each has."""

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
    rescored: Tensor | None,
    *,
    on_gpu: bool,
) -> Shard:
    """Measure the finite sequences; the others have weight 0 and enter no statistic.

    On a GPU non-finite sequences are measured as if they had no mismatch, and enter no denominator.
    """
    wide = train.double()
    log_ratio = wide - behavior
    ratio_sums, train_sums = sequences.sum(log_ratio), sequences.sum(wide)
    finite = ratio_sums.isfinite() & train_sums.isfinite()
    tokens = sequences.expand(finite)
    if on_gpu or finite.all():
        nonempty = (sequences.lengths > 0).nonzero()[:, 0]
        chosen = to_device(nonempty, log_ratio.device)
        shard = _measure(
            torch.where(tokens, log_ratio, 0.0),
            torch.where(finite, ratio_sums, 0.0)[chosen],
            torch.where(finite, train_sums, 0.0)[chosen],
            Sequences.from_lengths(sequences.lengths[nonempty]).to(log_ratio.device),
            torch.stack([tokens.sum(), finite[chosen].sum()]).double(),
            config,
            staleness,
            None if rescored is None else rescored.double() - behavior,
        )
        dtype = torch.promote_types(train.dtype, torch.float32)
        return replace(
            shard,
            weights=torch.where(tokens, shard.weights.to(dtype), 0.0),
            keep=shard.keep & tokens,
            log_weights=shard.log_weights.to(dtype),
        )
    shard = measure_shard(
        train[tokens],
        behavior[tokens],
        Sequences.from_lengths(sequences.lengths[finite]),
        config,
        None if staleness is None else staleness[tokens],
        None if rescored is None else rescored[tokens],
        on_gpu=False,
    )
    return replace(
        shard,
        weights=shard.weights.new_zeros(len(tokens)).masked_scatter_(tokens, shard.weights),
        keep=tokens.masked_scatter(tokens, shard.keep),
        vetoed=torch.zeros_like(tokens).masked_scatter_(tokens, shard.vetoed),
    )


def _measure(
    log_ratio: Tensor,
    log_ratio_sums: Tensor,
    train_sums: Tensor,
    sequences: Sequences,
    counts: Tensor,
    config: RolloutISSettings,
    staleness: Tensor | None,
    mismatch: Tensor | None,
) -> Shard:
    """Measure a shard whose sequences are finite and not empty. Inputs are float64."""
    level = WeightLevel(config, sequences)
    log_weights = level.aggregate(log_ratio, log_ratio_sums)
    raw = _within_safety(log_weights)
    factors, shrunk = split(log_ratio, mismatch, config), raw
    if factors.excess is not None:
        lowered = log_ratio - factors.excess
        shrunk = _within_safety(level.aggregate(lowered, sequences.sum(lowered)))
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
    extremes = _extremes(behind, log_weights, per_sequence) | rejection.extremes
    statistics = RolloutISStatistics.of(
        counts,
        sums,
        extremes,
        bounded=Moments.of(clipped, level.counts),
        applied=Moments.of(weights, level.counts),
        applied_units=Moments.of(weights),
        per_sequence=Moments.of(per_sequence),
        sequence_ratios=Moments.of(log_ratio_sums.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()),
        histogram=log_ratio_histogram(log_weights, level.counts),
        staleness=staleness_sums(staleness, log_ratio, clipped, changed, level),
    )
    return Shard(
        weights=level.to_tokens(weights),
        keep=rejection.keep if factors.keep is None else rejection.keep & factors.keep,
        vetoed=sequences.expand(vetoed),
        log_weights=log_weights,
        counts=None if level.by_token else sequences.lengths,
        statistics=statistics,
    )


def _within_safety(log_weights: Tensor) -> Tensor:
    """The weights, clamped to exp(+-SAFETY_BOUND)."""
    bound = math.exp(SAFETY_BOUND)
    return finite_exp(log_weights).clamp_(1 / bound, bound)


def _extremes(behind: Tensor, log_weights: Tensor, per_sequence: Tensor) -> dict[str, Tensor]:
    return {
        "mismatch/mismatch_log_ppl_diff_max": largest(behind),
        "mismatch/mismatch_log_ppl_diff_min": smallest(behind),
        "mismatch/rollout_is_max": largest(log_weights),
        "mismatch/rollout_is_min": smallest(log_weights),
        "mismatch/rollout_is_seq_max": largest(per_sequence),
        "mismatch/rollout_is_seq_min": smallest(per_sequence),
    }


_CPU_CHUNK_TOKENS = 1 << 16
"""Float64 scratch tensors of this size stay in a core's second-level cache."""


@dataclass(frozen=True, eq=False)
class RolloutIS:
    """Result of `rollout_is_weights`."""

    weights: Tensor | None
    """[R] importance weights, or None if they are off or not applied."""
    keep: Tensor
    """[R] bool; false for tokens rejected by a rule or by the second-moment limit, and for those
    of sequences with non-finite log-probabilities."""
    measure: Callable[[], dict[str, float]] = dict
    statistics: RolloutISStatistics | None = None
    """The statistics behind the metrics, to be merged over micro-batches and ranks."""
    vetoed: Tensor | None = None
    """[R] bool; true for tokens of vetoed sequences (weight 0). None if weights are off."""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics by their public names. Waits for the device."""
        return self.measure()

    @property
    def accepted(self) -> Tensor:
        """[R] bool; true for tokens removed neither by a rule nor by the veto, even if their weight
        is 0."""
        return self.keep if self.vetoed is None else self.keep & ~self.vetoed

    def loss_terms(self, config: RolloutISSettings) -> tuple[Tensor | None, Tensor | None]:
        """(importance_weights, loss_mask) [R] for a LossInput, by `normalize_by`.

        `all`: tokens that do not contribute have weight 0 and still count in the denominators.
        `kept`: they are masked out and do not count.
        """
        if config.normalize_by == "kept":
            mask = self.keep if self.weights is None else self.keep & (self.weights != 0)
            return self.weights, mask
        if self.weights is not None:
            return self.weights * self.keep, None
        # On a GPU the host would have to wait to know it.
        keeps_all = self.statistics is None or (not self.keep.is_cuda and bool(self.keep.all()))
        return None if keeps_all else self.keep.float(), None


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
        train_logprobs: [R] nats, under the proximal policy, or the current one if there is none.
        behavior_logprobs: [R] nats, under the distribution that was sampled from.
        staleness: [R] versions between sampling and training; adds metrics per bucket.
        advantages: [R], 0 for tokens that are not trained; `second_moment` needs them, and the
            whole batch in one call.
        rescored_logprobs: [R] nats, NaN if unknown; see `split`.

    Returns:
        Weights are float32, or float64 for float64 input. If it is off there are neither weights
        nor metrics.
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
                on_gpu=not on_cpu,
            )
            for rows, tokens in sequences.chunks(chunk)
        ]
        keep = torch.cat([shard.keep for shard in shards])
        if config.second_moment is None:
            return _assemble(shards, config, keep, {})
        if advantages is None:
            raise ValueError("second_moment: needs the advantages")
        log_ratio = train_logprobs.double() - behavior_logprobs
        counted = keep
        if config.applies_weights:
            counted = keep & ~torch.cat([shard.vetoed for shard in shards])
        bounded, metrics = bound_second_moment(log_ratio, advantages, counted, config.second_moment)
        return _assemble(shards, config, keep & bounded, metrics)


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
            by_token = config.level == "token"
            mean = float((statistics.applied if by_token else statistics.applied_units).mean)
            factor = mean if mean > 1e-8 else 1.0
            weights = weights / factor
            more = {**more, "mismatch/rollout_is_batch_norm_factor": factor}

    def measure() -> dict[str, float]:
        counts = [shard.counts for shard in shards if shard.counts is not None]
        log_weights = torch.cat([shard.log_weights for shard in shards])
        percentiles = weight_percentiles(log_weights, torch.cat(counts) if counts else None)
        return {**statistics.metrics(config, percentiles), **more}

    return RolloutIS(weights, keep, measure, statistics, vetoed)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run torch's CPU kernels on this thread alone.

    On chunks this small a second thread gains nothing, and if another process shares the cores,
    every barrier between threads costs milliseconds: seconds per call instead of 15 ms.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
