"""KL, aggregation, value loss, reward shaping and weights agree with what verl and ROLL gave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamrl.algorithms.advantages import ADVANTAGES, AdvantageInput
from streamrl.algorithms.kl import KlCoefficient, kl_penalty
from streamrl.algorithms.losses import (
    POLICY_LOSSES,
    BatchTotals,
    LossInput,
    aggregate,
    value_loss,
)
from streamrl.algorithms.moments import whiten
from streamrl.algorithms.reward_shaping import (
    RunningMoments,
    difficulty_mask,
    normalize,
    normalize_agentic,
    sample_weights,
    shape_rewards,
    token_rewards,
)
from streamrl.algorithms.rollout_is import rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rewards import RewardShapingSettings, SampleWeightSettings
from streamrl.config.algorithm.settings import KlRewardSettings, ValueSettings
from tests.settings import AdvantageConfig, LossConfig, RolloutISConfig
from tests.unit.algorithms.golden import Case, Padded, assert_agrees, cases, tensor

Pairs = dict[str, tuple[Any, Any]]

NOT_OFFERED = {
    "roll/01439": "agentic_reinforce gives all tokens of a turn the reward at the turn's last"
    " token; our tokens keep rewards of their own (discounted return: estimator reinforce)",
    "roll/01383": "its return counts the tokens between two turns as steps of the discount and its"
    " whitening runs in float32; flat tokens know no gap",
    "roll/01406": "whitening that keeps the mean",
}
DEVIATIONS: dict[str, dict[str, str]] = {}

KL_CASES = [
    case
    for source in ("misc_old", "misc_new", "roll")
    for case in cases(source)
    if case["id"] not in NOT_OFFERED
]


@pytest.mark.parametrize("case", KL_CASES, ids=lambda case: f"{case['id']}-{case['fn']}")
def test_case_agrees(case: Case) -> None:
    assert_agrees(case, ADAPTERS[case["fn"]](case), DEVIATIONS)


def _agg_loss(case: Case) -> Pairs:
    padded, params, old = Padded(case, "loss_mask"), case["params"], case["source"] != "misc_new"
    ranks = params.get("dp_size", 1)
    totals = BatchTotals(
        params.get("batch_num_tokens", padded.sequences.num_tokens) / ranks,
        params.get("global_batch_size", len(padded)) / ranks,
        padded.width,
    )
    per_token = padded.flat("loss_mat")
    if "weights" in padded.inputs:
        per_token = per_token * padded.sequences.expand(tensor(padded.inputs["weights"]))
    mode = params["loss_agg_mode"]
    config = LossConfig(norm_by_sequences=not old)
    loss = aggregate(per_token, padded.sequences, mode, totals, config=config)
    return {"loss": (loss, case["scalars"]["loss"])}


def _value_loss(case: Case) -> Pairs:
    padded, params = Padded(case), case["params"]
    values = padded.flat("vpreds").requires_grad_()
    config = ValueSettings(
        clip_range=params["cliprange_value"], loss_agg_mode=params["loss_agg_mode"]
    )
    returns, old_values = padded.flat("returns"), padded.flat("values")
    output = value_loss(values, old_values, returns, padded.sequences, config)
    (gradient,) = torch.autograd.grad(output.loss, values)
    return {
        "vf_loss": (output.loss.detach(), case["scalars"]["vf_loss"]),
        "vf_clipfrac": (output.metrics["critic/vf_clipfrac"], case["scalars"]["vf_clipfrac"]),
        "grad": (gradient, padded.flatten(case["out"]["grad"])),
    }


def _kl_penalty(case: Case) -> Pairs:
    logprobs = tensor(case["in"]["logprob"]).flatten().requires_grad_()
    reference = tensor(case["in"]["ref_logprob"]).flatten()
    kl = kl_penalty(logprobs, reference, case["params"]["kl_penalty"])
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    return {
        "kl": (kl.detach(), tensor(case["out"]["kl"]).flatten()),
        "grad": (gradient, tensor(case["out"]["grad"]).flatten()),
    }


def _approx_kl(case: Case) -> Pairs:
    padded = Padded(case, "action_mask")
    kind = case["params"]["kl_penalty"]
    kl = kl_penalty(padded.flat("log_probs"), padded.flat("log_probs_base"), kind)
    return {"kl": (kl, padded.flatten(case["out"]["kl"]))}


def _rewards_with_kl(case: Case) -> Pairs:
    policy, reference = tensor(case["in"]["old_log_prob"]), tensor(case["in"]["ref_log_prob"])
    sequences = Sequences.from_lengths([1] * policy.numel())
    rewards = token_rewards(
        torch.ones(policy.numel(), dtype=torch.float64),
        sequences,
        kl=kl_penalty(policy.flatten(), reference.flatten(), "kl"),
        kl_coef=case["params"]["kl_ratio"],
    )
    return {"rewards": (rewards, tensor(case["out"]["rewards"]).flatten())}


def _controller(case: Case) -> Pairs:
    numbers = case["params"]
    controller = KlCoefficient(
        KlRewardSettings(
            coef=numbers["init_kl_coef"],
            controller="adaptive",
            target=numbers["target_kl"],
            horizon=numbers["horizon"],
        )
    )
    values = []
    for current, num_steps, _ in case["trace"]:
        controller.update(current, num_steps)
        values.append(controller.value)
    return {"value": (values, [value for *_, value in case["trace"]])}


def _groups(case: Case, name: str = "rewards") -> torch.Tensor:
    return torch.arange(len(case["in"][name])) // case["params"]["n_sample"]


def _reward_norm(case: Case) -> Pairs:
    params, rewards = case["params"], tensor(case["in"]["rewards"])
    scopes = params["norm_mean_type"], params["norm_std_type"]
    ours = normalize(rewards, _groups(case), *scopes, RunningMoments())
    return {"rewards": (ours, tensor(case["out"]["rewards"]))}


def _reward_postprocess(case: Case) -> Pairs:
    params, rewards = case["params"], tensor(case["in"]["rewards"])
    scope = params["reward_norm"]
    # With estimator grpo ROLL normalizes by the group's mean and deviation, whatever is set.
    plain = params["adv_estimator"] == "grpo"
    config = RewardShapingSettings(
        norm_mean=scope if plain or not params["reward_scale"] else None,
        norm_std=scope if plain or not params["reward_shift"] else None,
        clip=params["reward_clip"],
    )
    sequences = Sequences.from_lengths([1] * len(rewards))
    none = torch.zeros(len(rewards))
    shaped, metrics = shape_rewards(
        rewards, _groups(case), sequences, config, RunningMoments(), none, none
    )
    fraction = metrics.get("reward/clipped_frac", 0.0)
    return {
        "rewards": (shaped, tensor(case["out"]["rewards"])),
        "clip": (fraction, case["scalars"]["critic/reward_clip_frac"]),
    }


def _group_reward_norm(case: Case) -> Pairs:
    params, rewards = case["params"], tensor(case["in"]["rewards"])
    groups = _groups(case)
    centered = normalize(rewards, groups, "group", None, RunningMoments())
    scope = ("batch" if params["div_std_global"] else "group") if params["div_std"] else None
    ours = normalize(centered, groups, None, scope, RunningMoments())
    return {"rewards": (ours, tensor(case["out"]["rewards"]))}


def _agentic(case: Case) -> Pairs:
    params, scores = case["params"], tensor(case["in"]["scores"])
    names = case["groups"]
    groups = torch.tensor([sorted(set(names)).index(name) for name in names])
    groups = torch.zeros_like(groups) if params["grouping"] == "batch" else groups
    ours = normalize_agentic(scores, groups, params.get("method", "mean_std"))
    return {"rewards": (ours, tensor(case["out"]["rewards"]))}


def _difficulty_mask(case: Case) -> Pairs:
    params, scores = case["params"], tensor(case["in"]["scores"])
    low, high = params["low_threshold"], params["high_threshold"]
    passes = difficulty_mask(scores, _groups(case, "scores"), low, high)
    return {"mask": (passes, case["out"]["mask"])}


def _sample_weights(case: Case) -> Pairs:
    params, padded = case["params"], Padded(case)
    config = SampleWeightSettings(
        difficulty=params["difficulty_loss_weight"], length=params["length_loss_weight"]
    )
    difficulty = tensor(case["in"]["difficulty"])
    weights = sample_weights(padded.sequences.lengths, config, difficulty)
    return {"weights": (weights, case["out"]["weights"])}


def _pg_variant(case: Case) -> Pairs:
    """One loss per token: aggregated by token-sum, token by token through its gradient."""
    padded, params = Padded(case), case["params"]
    logprobs = padded.flat("log_probs").requires_grad_()
    batch = LossInput(
        logprobs=logprobs,
        proximal_logprobs=padded.flat("old_log_probs"),
        advantages=padded.flat("advantages"),
        importance_weights=None,
        sequences=padded.sequences,
        rewards=tensor(padded.inputs["scores"]),
    )
    name, config = {
        "ppo": ("ppo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.4}),
        "kimi15": ("dro", {"dro_beta": 0.1}),
    }[params["variant"]]
    output = POLICY_LOSSES[name](batch, LossConfig(loss_agg_mode="token-sum", **config))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    recorded = padded.flatten(case["out"]["loss_mat"])
    return {
        "loss": (output.loss.detach(), recorded.sum()),
        "grad": (gradient, padded.flatten(case["out"]["grad_of_masked_sum"])),
    }


def _whiten(case: Case) -> Pairs:
    padded = Padded(case)
    ours = whiten(padded.flat("token_level_rewards"))
    return {"o": (ours, padded.flatten(case["out"]["o"]))}


def _advantage(case: Case) -> Pairs:
    padded, params = Padded(case), case["params"]
    batch = AdvantageInput(
        padded.flat("token_level_rewards"), torch.arange(len(padded)), padded.sequences
    )
    config = AdvantageConfig(gamma=params["gamma"], lam=params["lambd"])
    ours = ADVANTAGES[params["adv_estimator"]](batch, config)
    return {"returns": (ours, padded.flatten(case["out"]["returns"]))}


def _train_infer(case: Case) -> Pairs:
    """Weights only: ROLL's filter looks at differences of probabilities, ours at divergences."""
    padded, params = Padded(case), case["params"]
    level = {"segment": "geometric"}.get(params["weight_type"], params["weight_type"])
    config = RolloutISConfig(
        threshold=params["upper_bound"] or 1e8, level=level, veto_threshold=None
    )
    train, behavior = padded.flat("old_log_prob"), padded.flat("rollout_log_prob")
    result = rollout_is_weights(train, behavior, padded.sequences, config)
    return {"weights": (result.weights, padded.flatten(case["out"]["is_weight"]))}


ADAPTERS: dict[str, Callable[[Case], Pairs]] = {
    "agg_loss": _agg_loss,
    "compute_value_loss": _value_loss,
    "kl_penalty": _kl_penalty,
    "compute_approx_kl": _approx_kl,
    "compute_rewards": _rewards_with_kl,
    "AdaptiveKLController": _controller,
    "reward_norm": _reward_norm,
    "reward_postprocess": _reward_postprocess,
    "group_reward_norm": _group_reward_norm,
    "agentic_reward_norm": _agentic,
    "difficulty_mask": _difficulty_mask,
    "compute_sample_weights": _sample_weights,
    "pg_variant": _pg_variant,
    "masked_whiten": _whiten,
    "compute_advantage": _advantage,
    "compute_train_infer_correction": _train_infer,
}
