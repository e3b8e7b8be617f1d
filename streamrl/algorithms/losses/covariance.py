"""Losses that pick tokens by the covariance of advantage and log p: clip_cov, kl_cov."""

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregation import token_mean
from streamrl.algorithms.losses.finish import clip_terms, finish, unclamped_ratio
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import ClipCovSettings, KlCovSettings


def clip_cov(batch: LossInput, config: ClipCovSettings) -> LossOutput:
    """Drop the loss of random tokens of high covariance of A and log p (arXiv 2505.22617)."""
    log_ratio = batch.log_ratio
    plain, bounded = clip_terms(unclamped_ratio(log_ratio), batch.advantages, config)
    covariance = _covariance(batch).masked_fill(bounded > plain, -torch.inf)
    eligible = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = eligible.nonzero().squeeze(1)
    count = max(int(config.clip_cov_ratio * _num_counted(batch)), 1)
    chosen = candidates[torch.randperm(len(candidates))[:count].to(candidates.device)]
    dropped = torch.zeros_like(eligible).index_fill_(0, chosen, True)
    loss = torch.where(dropped, 0.0, torch.maximum(plain, bounded))
    return finish(batch, config, loss, log_ratio, dropped)


def kl_cov(batch: LossInput, config: KlCovSettings) -> LossOutput:
    """Penalize |D| on the tokens of highest covariance (arXiv 2505.22617).

    Its `ppo_kl` is the mean of |D|, as the original reports it.
    """
    log_ratio = batch.log_ratio
    loss = -batch.advantages * unclamped_ratio(log_ratio)
    num_counted = _num_counted(batch)
    if num_counted:
        top = _covariance(batch).topk(max(1, int(num_counted * config.kl_cov_ratio))).indices
        penalized = torch.zeros_like(loss).index_fill_(0, top, config.kl_cov_coef)
        loss = loss + penalized * log_ratio.abs()
    return finish(batch, config, loss, -log_ratio.detach().abs())


def _covariance(batch: LossInput) -> Tensor:
    """[R] (A - mean A)(log p - mean log p) without gradient; -inf where a token does not count."""
    mask = batch.loss_mask
    counted = torch.ones_like(batch.logprobs, dtype=torch.bool) if mask is None else mask
    advantages, logprobs = batch.advantages, batch.logprobs.detach()
    mean_advantage = token_mean(advantages, batch.sequences, None, mask)
    mean_logprob = token_mean(logprobs, batch.sequences, None, mask)
    covariance = (advantages - mean_advantage) * (logprobs - mean_logprob)
    return covariance.masked_fill(~counted, -torch.inf)


def _num_counted(batch: LossInput) -> int:
    return batch.sequences.num_tokens if batch.loss_mask is None else int(batch.loss_mask.sum())
