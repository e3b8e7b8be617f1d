"""Policy losses, their gradients and their metrics agree with what the originals gave."""

from typing import Any

import pytest
import torch

from streamrl.algorithms.losses import POLICY_LOSSES, BatchTotals, LossInput, LossOutput
from streamrl.algorithms.rollout_is import rollout_is_weights
from tests.settings import LossConfig, RolloutISConfig
from tests.unit.algorithms.golden import Case, Padded, assert_agrees, cases, tensor

NAN = "seq-mean-token-mean of the older verl is NaN once a sequence is empty; ours leaves it out"
NO_KL = "the older verl's gpg reports a constant 0 for ppo_kl; ours measures it"
DEVIATIONS = {
    "policy_loss_old/00895": {"pg_loss": NAN, "grad": NAN},
    "policy_loss_old/00927": {"pg_loss": NAN, "grad": NAN},
    "policy_loss_old/01258": {"pg_loss": NAN, "grad": NAN, "ppo_kl": NO_KL},
    "policy_loss_old/00719": {"ppo_kl": NO_KL},
    "policy_loss_old/00130": {"ppo_kl": NO_KL},
    "policy_loss_old/00233": {"ppo_kl": NO_KL},
    "policy_loss_old/00037": {"ppo_kl": NO_KL},
    "policy_loss_old/00627": {"ppo_kl": NO_KL},
    "policy_loss_old/00141": {"ppo_kl": NO_KL},
    "policy_loss_old/00630": {"ppo_kl": NO_KL},
}

METRICS = {
    "pg_clipfrac": "actor/pg_clipfrac",
    "ppo_kl": "actor/ppo_kl",
    "pg_clipfrac_lower": "actor/pg_clipfrac_lower",
}

OLD_AND_NEW = [*cases("policy_loss_old"), *cases("policy_loss_new")]
BYPASS = [case for case in OLD_AND_NEW if case["loss"] == "bypass_mode"]
PLAIN = [case for case in OLD_AND_NEW if case["loss"] != "bypass_mode"]


@pytest.fixture(autouse=True)
def _no_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings of clip_cov were made with the identity in place of a random permutation."""
    monkeypatch.setattr(torch, "randperm", torch.arange)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["id"])
def test_loss_gradient_and_metrics_agree(case: Case) -> None:
    padded = Padded(case)
    logprobs = padded.flat("log_prob").requires_grad_()
    weights = padded.flat("rollout_is_weights") if case["weights"] else None
    old = case["source"] == "policy_loss_old"
    batch = LossInput(
        logprobs=logprobs,
        proximal_logprobs=padded.flat("old_log_prob"),
        advantages=padded.flat("advantages"),
        importance_weights=weights,
        sequences=padded.sequences,
        totals=_totals(case, padded),
    )
    name = {"vanilla": "ppo"}.get(case["loss"], case["loss"])
    output = POLICY_LOSSES[name](batch, _config(case, padded, norm_by_sequences=not old))
    assert_agrees(case, _pairs(case, padded, output, logprobs), DEVIATIONS)


@pytest.mark.parametrize("case", BYPASS, ids=lambda case: case["id"])
def test_rejection_and_weights_compose_with_the_loss(case: Case) -> None:
    """verl's bypass mode is reinforce with weights of the current policy, on what rules keep."""
    padded = Padded(case)
    logprobs, behavior = padded.flat("log_prob").requires_grad_(), padded.flat("old_log_prob")
    correction = case["cfg"]["rollout_correction"]
    rule = correction.get("rollout_rs")
    config = RolloutISConfig(
        threshold=correction["rollout_is_threshold"],
        level=correction["rollout_is"],
        veto_threshold=None,
        batch_normalize=correction.get("rollout_is_batch_normalize", False),
        rejection=[{rule: correction["rollout_rs_threshold"]}] if rule else [],
    )
    rollout = rollout_is_weights(logprobs.detach(), behavior, padded.sequences, config)
    batch = LossInput(
        logprobs=logprobs,
        proximal_logprobs=behavior,
        advantages=padded.flat("advantages"),
        importance_weights=rollout.weights,
        sequences=padded.sequences,
        loss_mask=rollout.keep,
    )
    output = POLICY_LOSSES["reinforce"](batch, LossConfig(loss_agg_mode=case["agg"]))
    assert_agrees(case, _pairs(case, padded, output, logprobs), DEVIATIONS)


def _config(case: Case, padded: Padded, norm_by_sequences: bool) -> LossConfig:
    cfg = case["cfg"]
    info = cfg.get("global_batch_info", {})
    same = {
        name: cfg[name]
        for name in (
            "clip_ratio_low",
            "clip_ratio_high",
            "clip_ratio_c",
            "clip_cov_ratio",
            "clip_cov_lb",
            "clip_cov_ub",
            "kl_cov_ratio",
            "dro_beta",
        )
        if name in cfg
    }
    renamed = {"kl_cov_coef": cfg["ppo_kl_coef"]} if "ppo_kl_coef" in cfg else {}
    return LossConfig(
        loss_agg_mode=case["agg"],
        loss_scale_factor=info.get("loss_scale_factor") or padded.width,
        norm_by_sequences=norm_by_sequences,
        **same,
        **renamed,
    )


def _totals(case: Case, padded: Padded) -> BatchTotals | None:
    """The denominators the original was told, or that it took from its padded batch."""
    info = case["cfg"].get("global_batch_info", {})
    if info.get("batch_num_tokens"):
        ranks = info["dp_size"]
        return BatchTotals(
            info["batch_num_tokens"] / ranks, info["global_batch_size"] / ranks, padded.width
        )
    if case["source"] == "policy_loss_old" and case["agg"] == "seq-mean-token-sum":
        return BatchTotals(padded.sequences.num_tokens, len(padded), padded.width)
    return None


def _pairs(
    case: Case, padded: Padded, output: LossOutput, logprobs: torch.Tensor
) -> dict[str, tuple[Any, Any]]:
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    recorded = {name.removeprefix("actor/"): value for name, value in case["scalars"].items()}
    told_totals = bool(case["cfg"].get("global_batch_info", {}).get("batch_num_tokens"))
    metrics = {
        name: (output.metrics[ours], recorded[name])
        for name, ours in METRICS.items()
        if name in recorded and not told_totals
    }
    grad = tensor(case["out"]["grad"])
    outside = grad.masked_fill(padded.mask, 0.0).nan_to_num()
    assert not outside.any(), f"{case['id']}: the original has gradient outside its mask"
    return metrics | {
        "pg_loss": (output.loss.detach(), recorded["pg_loss"]),
        "grad": (gradient, padded.flatten(case["out"]["grad"])),
    }
