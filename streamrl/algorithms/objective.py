"""The training objective of one micro-batch, as described by the `algorithm:` section.

    rl_loss_coef * policy loss + kl coef * KL + distillation coef * KL to the teacher
        - entropy_coef * entropy + sft_coef * SFT + echo_coef * cross-entropy of observations

Invariant: a term with coefficient 0 is not computed. Loss and metrics of micro-batches that share
totals add up to those of the step.

The proximal policy is the denominator of the clipped ratio, and so decides how stale data are
corrected. Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298) splits
current/behavior into current/proximal, which is clipped, and proximal/behavior, which is a weight.
`algorithm.proximal` is

- recompute: the learner's policy at the start of the step, by a forward pass;
- behavior: no proximal policy; the loss's ratio is current/behavior, clipped as in plain PPO, and
  only losses without a ratio get importance weights;
- loglinear: no pass; the log-probability is interpolated between behavior and current by the
  token's staleness (A-3PO, arXiv 2512.06547; AReaL);
- linear: the same interpolation of the probability (AReaL), which gives at least as much.
"""

import torch
from torch import Tensor

from streamrl.algorithms.advantages import advantage_estimator
from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.kl import kl_penalty
from streamrl.algorithms.losses import (
    LossInput,
    LossOutput,
    ObservedInput,
    observation_loss,
    policy_loss,
    sft_loss,
    term,
)
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.errors import ConfigError

OBSERVED = "actor/observation_token_frac"
"""Metric: the share of tokens that `echo_coef` applies to."""


def proximal_logprobs(
    mode: str, logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor
) -> Tensor:
    """[R] log-probabilities under the proximal policy, for the modes without a forward pass.

    If a token was sampled s versions ago, the update in progress makes the (s + 1)-th version after
    it, so the proximal policy is s / (s + 1) of the way from behavior to current.

    Args:
        logprobs: [R] under the current policy; without gradient.
        staleness: [R] versions between sampling and training.
    """
    behavior = behavior_logprobs.detach()
    if mode == "behavior":
        return behavior
    lag = staleness.abs().to(torch.promote_types(logprobs.dtype, torch.float32))
    behavior, current = behavior.to(lag.dtype), logprobs.detach().to(lag.dtype)
    if mode == "linear":
        return torch.logaddexp(behavior, current + lag.log()) - lag.log1p()
    return torch.lerp(behavior, current, lag / (lag + 1))


def require_algorithm(config: AlgorithmSettings) -> None:
    """Load the loss and the advantage that are named, so that errors come before the first step.

    Raises:
        ConfigError: a user's own loss or advantage cannot be loaded.
    """
    policy_loss(config.loss)
    advantage_estimator(config.advantage)


def policy_objective(
    batch: LossInput,
    config: AlgorithmSettings,
    reference_logprobs: Tensor | None = None,
    exact_kl: Tensor | None = None,
    entropy: Tensor | None = None,
    teacher_kl: Tensor | None = None,
    observed: ObservedInput | None = None,
) -> LossOutput:
    """Loss and metrics (prefix `actor/`).

    Args:
        reference_logprobs: [R] nats, needed if `kl_loss.coef` is not 0.
        exact_kl: [R] with gradient, from `kl.full_kl`, in place of them for kind `full`.
        entropy: [R] nats with gradient, needed if `entropy_coef` is not 0; reported if given.
        teacher_kl: [R] with gradient, from `kl.topk_teacher_kl`, needed with `distillation.top_k`.
        observed: needed if `echo_coef` is not 0.
    """
    numbers = config.loss_config
    policy = _policy_loss(batch, config)
    terms = [("actor/pg_loss", config.rl_loss_coef, policy.loss)]
    if config.kl_loss.coef:
        kl = exact_kl
        if config.kl_loss.kind != "full":
            assert reference_logprobs is not None, "the targets have them"
            kl = kl_penalty(batch.logprobs, reference_logprobs, config.kl_loss.kind)
        assert kl is not None, "the pass was given the reference"
        terms.append(("actor/kl_loss", config.kl_loss.coef, term(kl, batch, numbers)))
    if config.distillation is not None and config.num_taught:
        assert teacher_kl is not None, "the pass was given the teacher's candidates"
        coef = config.distillation.coef
        terms.append(("actor/teacher_kl", coef, term(teacher_kl, batch, numbers)))
    if config.entropy_coef:
        assert entropy is not None, "the pass was asked for it"
        terms.append(("actor/entropy_bonus", -config.entropy_coef, term(entropy, batch, numbers)))
    if config.sft_coef:
        terms.append(("actor/sft_loss", config.sft_coef, sft_loss(batch, numbers)))
    if config.echo_coef:
        assert observed is not None, "the pass was asked for them"
        loss = observation_loss(observed, numbers)
        terms.append(("actor/observation_loss", config.echo_coef, loss))
    loss = torch.stack([coef * value for _, coef, value in terms]).sum()
    metrics = policy.metrics | {name: value.detach() for name, _, value in terms}
    if observed is not None:
        num_all = observed.totals.num_tokens + batch.batch_totals.num_tokens
        fraction = observed.sequences.num_tokens / max(num_all, 1)
        metrics = metrics | {OBSERVED: observed.logprobs.new_tensor(fraction)}
    if entropy is not None:
        metrics = metrics | {"actor/entropy": batch.mean(entropy)}
    return LossOutput(loss, metrics | {"actor/loss": loss.detach()})


def trained_fraction(batch: LossInput, config: AlgorithmSettings) -> Tensor:
    """Share of the counted tokens that contribute to the loss. A weight of 0 removes a token from
    the policy loss, not from the other terms. Shares of micro-batches add up as loss metrics do."""
    trained = torch.ones_like(batch.logprobs)
    if batch.importance_weights is not None and not config.has_other_terms:
        trained = (batch.importance_weights != 0).to(trained.dtype)
    return batch.mean(trained)


def mask_metrics(mask: Candidates | None, batch: LossInput) -> dict[str, Tensor]:
    """Share of the counted tokens that have a sampling mask, and the mean number of candidates per
    token (0 without a mask). Those of micro-batches add up as loss metrics do."""
    zeros = torch.zeros_like(batch.logprobs.detach())
    counts = zeros if mask is None else mask.counts.to(zeros.dtype)
    parts = {"masked_token_frac": (counts > 0).to(zeros.dtype), "mask_size": counts}
    return {f"actor/sampling_{name}": batch.mean(values) for name, values in parts.items()}


def _policy_loss(batch: LossInput, config: AlgorithmSettings) -> LossOutput:
    output = policy_loss(config.loss)(batch, config.loss_config)
    if not isinstance(output, LossOutput):
        raise ConfigError(
            f"algorithm.loss: {config.loss} returned {type(output).__name__}; it must return "
            "LossOutput(loss, metrics)"
        )
    return output
