"""Advantages agree with what verl's estimators gave."""

import pytest
import torch

from streamrl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInput,
    gae_returns,
)
from streamrl.algorithms.sequences import Sequences
from tests.settings import AdvantageConfig
from tests.unit.algorithms.golden import Case, Padded, assert_agrees, cases, tensor

BY_HAND = {"reinforce", "dr_grpo", "opob", "maxrl", "gigpo", "rae"}
"""Without a recorded case."""
OTHER_NAMES = {"optimal_token_baseline": "otb", "tir_optimal_token_baseline": "otb"}
ALONE = "the original's vectorized variant gives 0 to a group of one; its plain one, and we, s"
UNSEEN = "a sibling without response tokens holds a reward, which counts in no whitening of ours"
DEVIATIONS = {
    "advantage_old/00188": {"advantages": UNSEEN},
    "advantage_new/00290": {"advantages": UNSEEN},
    "advantage_new/00208": {"advantages": UNSEEN},
    "advantage_new/00169": {"advantages": ALONE},
}

OFFERED = [*cases("advantage_old"), *cases("advantage_new")]

BY_TOKEN = ("gae", "reinforce_plus_plus", "remax", *OTHER_NAMES)
BY_GROUP = ("grpo", "grpo_passk", "rloo", "gpg")


@pytest.mark.parametrize("case", OFFERED, ids=lambda case: f"{case['id']}-{case['estimator']}")
def test_advantages_agree(case: Case) -> None:
    name = _name(case)
    config = _config(case)
    padded = Padded(case)
    mask = padded.mask
    if name in BY_GROUP:
        # A sibling without tokens still holds a reward in the originals: lend it a token.
        mask = mask.clone()
        mask[:, 0] |= ~mask.any(1)
    batch = _input(case, mask)
    if "raises" in case:
        with pytest.raises(ValueError, match="at least 2"):
            ADVANTAGES[name](batch, config)
        return
    advantages = ADVANTAGES[name](batch, config)[padded.mask[mask]]
    pairs = {"advantages": (advantages, padded.flatten(case["out"]["advantages"]))}
    if name == "gae":
        returns = padded.flatten(case["out"]["returns"])
        pairs |= {"returns": (gae_returns(batch, config), returns)}
    assert_agrees(case, pairs, DEVIATIONS)


def test_every_estimator_is_compared_or_listed() -> None:
    assert {_name(case) for case in OFFERED} | BY_HAND == set(ADVANTAGES)


def _name(case: Case) -> str:
    """Without components the original's gdpo has one reward, the sum."""
    name = case["estimator"].removesuffix("_vectorized")
    return OTHER_NAMES.get(name, name)


def _input(case: Case, mask: torch.Tensor) -> AdvantageInput:
    inputs = case["in"]
    rewards = tensor(inputs["token_level_rewards"])
    if case["estimator"] not in BY_TOKEN:
        rewards = _moved_inside(rewards, mask)
    names = case.get("index", list(range(len(mask))))
    logprobs = tensor(inputs["old_log_probs"]) if "old_log_probs" in inputs else None
    weights = tensor(inputs["rollout_is_weights"]) if "rollout_is_weights" in inputs else None
    behavior = logprobs if weights is None else logprobs - weights.log()
    return AdvantageInput(
        token_rewards=rewards[mask],
        groups=torch.tensor([sorted(set(names)).index(name) for name in names]),
        sequences=Sequences.from_lengths(mask.sum(1)),
        values=tensor(inputs["values"])[mask] if "values" in inputs else None,
        baseline=tensor(inputs["reward_baselines"]) if "reward_baselines" in inputs else None,
        logprobs=None if logprobs is None else logprobs[mask],
        behavior_logprobs=None if behavior is None else behavior[mask],
        squared_probabilities=(
            tensor(inputs["sum_pi_squared"])[mask] if "sum_pi_squared" in inputs else None
        ),
        components=tensor(inputs["token_level_rewards"]).sum(1, keepdim=True),
    )


def _moved_inside(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The originals add up a whole padded row; put what stands outside the mask onto its end."""
    outside = torch.where(mask, 0.0, rewards).sum(1)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return rewards.scatter_add(1, last[:, None], outside[:, None])


def _config(case: Case) -> AdvantageConfig:
    params = case["params"] | case["params"].get("config", {})
    renamed = {"norm_adv_by_std_in_grpo": "norm_adv_by_std"}
    # The baseline of what only the longest sibling has is its own return, or 0 as in our choice.
    ours = {name: value for name, value in params.items() if name not in _NOT_OURS}
    return AdvantageConfig(
        rewards={"sum": 1.0}, **{renamed.get(name, name): value for name, value in ours.items()}
    )


_NOT_OURS = ("config", "handle_zero_tail")
