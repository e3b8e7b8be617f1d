"""Losses that drop the tokens outside a trust region: dppo_tv, dppo_kl."""

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.losses.finish import clamped_ratio, finish
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import DppoSettings

_LEAST_REST = 1e-12
"""As the authors' code has it (github.com/sail-sg/Stable-RL, verl/workers/actor/utils.py)."""


def dppo_tv(batch: LossInput, config: DppoSettings) -> LossOutput:
    """Trust region on the change of the token's probability, or on the total variation of the
    likeliest candidates (DPPO, arXiv 2602.04879)."""
    if config.divergence_topk:
        return _truncated_reinforce(batch, config, _is_inside(batch, config, topk_tv(batch)))
    change = batch.logprobs.detach().exp() - batch.proximal_logprobs.exp()
    inside = torch.where(
        batch.advantages > 0, change <= config.clip_ratio_high, change >= -config.clip_ratio_low
    )
    return _truncated_reinforce(batch, config, inside)


def dppo_kl(batch: LossInput, config: DppoSettings) -> LossOutput:
    """Trust region on the KL of "this token or another", or of the likeliest candidates (DPPO,
    arXiv 2602.04879)."""
    if config.divergence_topk:
        return _truncated_reinforce(batch, config, _is_inside(batch, config, topk_kl(batch)))
    new_log, old_log = batch.logprobs.detach(), batch.proximal_logprobs
    new, old = new_log.exp(), old_log.exp()
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log - new_log) + rest
    return _truncated_reinforce(batch, config, _is_inside(batch, config, divergence))


def topk_tv(batch: LossInput) -> Tensor:
    """[R] half the sum of |p - q| over the token, its likeliest candidates, and all others as one:
    q of the behavior policy, p of the current one."""
    token, others = _terms(batch)
    changes = [(part.p - part.q).abs() for part in (token, others)]
    rest = (_rest(token.p, others.p, batch) - _rest(token.q, others.q, batch)).abs()
    return (changes[0] + _candidates(batch).sum(changes[1]) + rest) / 2


def topk_kl(batch: LossInput) -> Tensor:
    """[R] KL(q, p) of the same distributions."""
    token, others = _terms(batch)
    parts = [part.q * (part.log_q - part.log_p) for part in (token, others)]
    rest_p, rest_q = _rest(token.p, others.p, batch), _rest(token.q, others.q, batch)
    rest = rest_q * (rest_q.log() - rest_p.log())
    return parts[0] + _candidates(batch).sum(parts[1]) + rest


class _Terms(NamedTuple):
    log_p: Tensor
    log_q: Tensor

    @property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @property
    def q(self) -> Tensor:
        return self.log_q.exp()


def _terms(batch: LossInput) -> tuple[_Terms, _Terms]:
    """Of the tokens [R], and of their candidates [M]."""
    behavior = _candidates(batch).behavior_logprobs
    if batch.top_logprobs is None or behavior is None:
        raise ValueError("top_logprobs: divergence_topk needs those of both policies")
    token = _Terms(batch.logprobs.detach(), batch.proximal_logprobs)
    return token, _Terms(batch.top_logprobs, behavior)


def _candidates(batch: LossInput) -> Candidates:
    if batch.top_candidates is None:
        raise ValueError("top_candidates: divergence_topk needs the likeliest candidates")
    return batch.top_candidates


def _rest(token: Tensor, others: Tensor, batch: LossInput) -> Tensor:
    """[R] the probability of all that are neither the token nor among its candidates."""
    return (1 - token - _candidates(batch).sum(others)).clamp(min=_LEAST_REST)


def _is_inside(batch: LossInput, config: DppoSettings, divergence: Tensor) -> Tensor:
    """[R] bool: within the trust region, or on the way back to it."""
    new, old = batch.logprobs.detach(), batch.proximal_logprobs
    return torch.where(
        batch.advantages > 0,
        (divergence <= config.clip_ratio_high) | (new <= old),
        (divergence <= config.clip_ratio_low) | (new >= old),
    )


def _truncated_reinforce(batch: LossInput, config: DppoSettings, inside: Tensor) -> LossOutput:
    """-A min(r, C) log p, the ratio a constant, on the tokens inside the trust region."""
    log_ratio, ratio = clamped_ratio(batch)
    ratio = ratio.detach()
    truncated = ratio if config.clip_ratio_c is None else ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(inside, -batch.advantages * truncated * batch.logprobs, 0.0)
    return finish(batch, config, loss, log_ratio, ~inside, inside & (ratio != truncated))
