"""Losses that weigh log p: gpg, reinforce, dro, topr."""

import torch

from streamrl.algorithms.losses.finish import clamped_ratio, finish
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import (
    DroSettings,
    GpgSettings,
    ReinforceSettings,
    ToprSettings,
)


def gpg(batch: LossInput, config: GpgSettings) -> LossOutput:
    """Group policy gradient (arXiv 2504.02546): -A log p."""
    return finish(batch, config, -batch.logprobs * batch.advantages, batch.log_ratio)


def reinforce(batch: LossInput, config: ReinforceSettings) -> LossOutput:
    """-A log p; importance weights make it off-policy (arXiv 1802.01561)."""
    return finish(batch, config, -batch.advantages * batch.logprobs, batch.log_ratio)


def dro(batch: LossInput, config: DroSettings) -> LossOutput:
    """-A log p with a quadratic penalty on D (DRO, arXiv 2405.19107; Kimi k1.5 with tau = beta)."""
    log_ratio = batch.log_ratio
    penalty = 0.5 * config.dro_beta * log_ratio.square()
    return finish(batch, config, penalty - batch.logprobs * batch.advantages, log_ratio)


def topr(batch: LossInput, config: ToprSettings) -> LossOutput:
    """Positive trajectories as in SFT, negative ones tapered (TOPR, arXiv 2503.14286)."""
    if batch.rewards is None:
        raise ValueError("rewards: loss topr needs the trajectory rewards [S]")
    log_ratio, ratio = clamped_ratio(batch)
    positive = batch.sequences.expand(batch.rewards > 0)
    taper = config.topr_negative_weight * ratio.detach().clamp(0, 1)
    weight = torch.where(positive, config.topr_positive_weight, taper)
    loss = -weight * batch.advantages * batch.logprobs
    return finish(batch, config, loss, log_ratio, ~positive & (ratio.detach() > 1))
