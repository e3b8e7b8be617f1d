"""Weights, kept tokens and metrics of one batch: the entry of rollout importance sampling."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.rollout_is.second_moment import SecondMoment, bound_second_moment
from streamrl.algorithms.rollout_is.shard import Shard, measure_shard
from streamrl.algorithms.rollout_is.statistics import (
    Reduce,
    RolloutISStatistics,
    weight_percentiles,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings

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
    metrics: dict[str, float]
    statistics: RolloutISStatistics | None = None
    """What the metrics were computed from, to be merged over micro-batches and ranks."""
    vetoed: Tensor | None = None
    """[R] bool; true: of a sequence that the veto gives weight 0. None where weights are off."""

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
        if self.weights is None and bool(self.keep.all()):
            return None, None
        weights = self.keep.float() if self.weights is None else self.weights * self.keep
        return weights, None


def rollout_is_weights(
    train_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    config: RolloutISSettings,
    staleness: Tensor | None = None,
    reduce: Reduce | None = None,
    advantages: Tensor | None = None,
) -> RolloutIS:
    """Weights, kept tokens and metrics of one batch, or of one shard of it.

    Args:
        train_logprobs: [R] nats, under the policy that the loss is anchored to.
        behavior_logprobs: [R] nats, under the distribution actually sampled from.
        staleness: [R] versions between sampling and training; adds metrics per bucket.
        reduce: merges this shard's statistics with those of the others, for instance
            `RolloutISStatistics.merge_ranks`; metrics and batch normalization are then those of
            the whole batch.
        advantages: [R], 0 for tokens that are not trained; `second_moment` needs them, and a whole
            batch.

    Returns:
        RolloutIS; weights are float32, or float64 for float64 input. With `threshold` null, no
        rejection and no `second_moment` everything is off: weights None, no metrics.
    """
    given = {"train_logprobs": train_logprobs, "behavior_logprobs": behavior_logprobs}
    _check(given | {"staleness": staleness, "advantages": advantages}, sequences)
    if config.is_off:
        return RolloutIS(None, torch.ones_like(train_logprobs, dtype=torch.bool), {})
    on_cpu = train_logprobs.device.type == "cpu"
    with torch.no_grad(), _single_thread() if on_cpu else nullcontext():
        on_device = sequences.to(train_logprobs.device)
        chunk = _CPU_CHUNK_TOKENS if on_cpu else sequences.num_tokens
        shards = [
            measure_shard(
                train_logprobs[tokens],
                behavior_logprobs[tokens],
                on_device[rows],
                config,
                None if staleness is None else staleness[tokens],
            )
            for rows, tokens in on_device.chunks(chunk)
        ]
        if config.second_moment is None:
            return _assemble(shards, config, reduce)
        if advantages is None or reduce is not None:
            raise ValueError("second_moment: needs the advantages, and all tokens of the batch")
        log_ratio = train_logprobs.double() - behavior_logprobs
        counted = torch.cat([_counted(shard, config) for shard in shards])
        bounded = bound_second_moment(log_ratio, advantages, counted, config.second_moment)
        return _assemble(shards, config, reduce, bounded)


def _applies_weights(config: RolloutISSettings) -> bool:
    """The veto too, which makes weights 0."""
    return config.threshold is not None and config.apply


def _counted(shard: Shard, config: RolloutISSettings) -> Tensor:
    """[R] of the shard: whether the token is trained, as far as the other rules go."""
    return shard.keep & ~shard.vetoed if _applies_weights(config) else shard.keep


def _assemble(
    shards: list[Shard],
    config: RolloutISSettings,
    reduce: Reduce | None,
    bounded: SecondMoment | None = None,
) -> RolloutIS:
    statistics = shards[0].statistics
    for shard in shards[1:]:
        statistics = statistics.merge(shard.statistics)
    if reduce is None:
        metrics = statistics.metrics(config, _exact_percentiles(shards))
    else:
        statistics = reduce(statistics)
        metrics = statistics.metrics(config)
    keep = torch.cat([shard.keep for shard in shards])
    if bounded is not None:
        keep, metrics = keep & bounded.keep, metrics | bounded.metrics
    if not _applies_weights(config):
        return RolloutIS(None, keep, metrics, statistics)
    weights = torch.cat([shard.weights for shard in shards])
    vetoed = torch.cat([shard.vetoed for shard in shards])
    if config.batch_normalize:
        factor = _mean_weight(statistics, config)
        weights = weights / factor
        metrics = metrics | {"mismatch/rollout_is_batch_norm_factor": factor}
    return RolloutIS(weights, keep, metrics, statistics, vetoed)


def _exact_percentiles(shards: list[Shard]) -> Tensor:
    counts = [shard.counts for shard in shards if shard.counts is not None]
    log_weights = torch.cat([shard.log_weights for shard in shards])
    return weight_percentiles(log_weights, torch.cat(counts) if counts else None)


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


def _check(given: Mapping[str, Tensor | None], sequences: Sequences) -> None:
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != (sequences.num_tokens,):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name}: has shape {shape}; must be ({sequences.num_tokens},)")
