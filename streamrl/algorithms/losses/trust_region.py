"""Losses that drop the tokens outside a trust region: dppo_tv, dppo_kl."""

import torch
from torch import Tensor

from streamrl.algorithms.losses.finish import clamped_ratio, finish
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import DppoSettings


def dppo_tv(batch: LossInput, config: DppoSettings) -> LossOutput:
    """Trust region on the change of the token's probability (DPPO, arXiv 2602.04879)."""
    change = batch.logprobs.detach().exp() - batch.proximal_logprobs.exp()
    inside = torch.where(
        batch.advantages > 0, change <= config.clip_ratio_high, change >= -config.clip_ratio_low
    )
    return _truncated_reinforce(batch, config, inside)


def dppo_kl(batch: LossInput, config: DppoSettings) -> LossOutput:
    """Trust region on the KL of "this token or another" (DPPO, arXiv 2602.04879)."""
    new_log, old_log = batch.logprobs.detach(), batch.proximal_logprobs
    new, old = new_log.exp(), old_log.exp()
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log - new_log) + rest
    inside = torch.where(
        batch.advantages > 0,
        (divergence <= config.clip_ratio_high) | (new <= old),
        (divergence <= config.clip_ratio_low) | (new >= old),
    )
    return _truncated_reinforce(batch, config, inside)


def _truncated_reinforce(batch: LossInput, config: DppoSettings, inside: Tensor) -> LossOutput:
    """-A min(r, C) log p, the ratio a constant, on the tokens inside the trust region."""
    log_ratio, ratio = clamped_ratio(batch)
    ratio = ratio.detach()
    truncated = ratio if config.clip_ratio_c is None else ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(inside, -batch.advantages * truncated * batch.logprobs, 0.0)
    return finish(batch, config, loss, log_ratio, ~inside, inside & (ratio != truncated))
