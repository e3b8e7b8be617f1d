"""Correction for stale data: what `algorithm.rollout_is` makes of log-probabilities.

Invariant: rejection and veto act under every `algorithm.proximal`; other weights than 0 and 1 do
not where the ratio of the loss is the importance ratio itself. What tokens that are taken out count
for in the denominators is said by `normalize_by` alone.
Shapes: R response tokens.
"""

from dataclasses import dataclass, replace

import torch

from streamrl.algorithms.proximal import proximal_logprobs, weighed_logprobs
from streamrl.algorithms.rollout_is import RolloutISStatistics, rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm import AlgorithmSettings


@dataclass(frozen=True, eq=False)
class Correction:
    """Of a batch, a mini-batch or a micro-batch."""

    weights: torch.Tensor | None
    """[R] importance weights; None for 1."""
    mask: torch.Tensor | None
    """[R] bool, the tokens that stay in the loss; None keeps all."""
    metrics: dict[str, float]
    statistics: RolloutISStatistics | None
    """What the metrics were computed from; None if it is off."""

    def masked(self, loss_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The loss mask [R] without the tokens that the correction takes out."""
        if self.mask is None or loss_mask is None:
            return loss_mask if self.mask is None else self.mask
        return loss_mask & self.mask


def correct(
    config: AlgorithmSettings,
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    staleness: torch.Tensor,
    sequences: Sequences,
    advantages: torch.Tensor | None = None,
) -> Correction:
    """The correction of these tokens [R].

    Args:
        logprobs: under the policy at the start of the batch for proximal `recompute`, else under
            the current one.
        advantages: 0 for tokens that are not trained; of a batch that is corrected as a whole.
    """
    proximal = logprobs
    if config.proximal != "recompute":
        proximal = proximal_logprobs(config.proximal, logprobs, behavior_logprobs, staleness)
    train = weighed_logprobs(config, logprobs, proximal)
    found = rollout_is_weights(
        train,
        behavior_logprobs,
        sequences,
        config.rollout_is,
        staleness,
        advantages=advantages,
    )
    if config.ratio_holds_correction:
        found = replace(found, weights=None, keep=found.accepted)
    weights, mask = found.loss_terms(config.rollout_is)
    return Correction(weights, mask, found.metrics, found.statistics)
