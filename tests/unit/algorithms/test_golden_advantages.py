"""Advantages agree with what verl's estimators gave."""

import pytest
import torch

from streamrl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageConfig,
    AdvantageInput,
    gae_returns,
)
from streamrl.algorithms.sequences import Sequences
from tests.unit.algorithms.golden import Case, Padded, assert_agrees, cases, tensor

NOT_OFFERED = {
    "gdpo": "normalizes several reward components, which a trajectory's one reward does not hold",
    "optimal_token_baseline": "needs the sum of squared probabilities of every position",
    "tir_optimal_token_baseline": "needs the sum of squared probabilities of every position",
}
ALONE = "the original's vectorized variant gives 0 to a group of one; its plain one, and we, s"
UNSEEN = "a sibling without response tokens holds a reward, which counts in no whitening of ours"
DEVIATIONS = {
    "advantage_old/00188": {"advantages": UNSEEN},
    "advantage_new/00290": {"advantages": UNSEEN},
    "advantage_new/00208": {"advantages": UNSEEN},
    "advantage_new/00169": {"advantages": ALONE},
}

ALL = [*cases("advantage_old"), *cases("advantage_new")]
OFFERED = [case for case in ALL if case["estimator"] not in NOT_OFFERED]

BY_TOKEN = ("gae", "reinforce_plus_plus", "remax")
BY_GROUP = ("grpo", "grpo_passk", "rloo", "gpg")


@pytest.mark.parametrize("case", OFFERED, ids=lambda case: f"{case['id']}-{case['estimator']}")
def test_advantages_agree(case: Case) -> None:
    name = case["estimator"].removesuffix("_vectorized")
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
    compared = {case["estimator"].removesuffix("_vectorized") for case in OFFERED}
    assert compared | {"reinforce", "dr_grpo", "opob"} == set(ADVANTAGES)


def _input(case: Case, mask: torch.Tensor) -> AdvantageInput:
    inputs = case["in"]
    rewards = tensor(inputs["token_level_rewards"])
    if case["estimator"] not in BY_TOKEN:
        rewards = _moved_inside(rewards, mask)
    names = case.get("index", list(range(len(mask))))
    return AdvantageInput(
        token_rewards=rewards[mask],
        groups=torch.tensor([sorted(set(names)).index(name) for name in names]),
        sequences=Sequences.from_lengths(mask.sum(1)),
        values=tensor(inputs["values"])[mask] if "values" in inputs else None,
        baseline=tensor(inputs["reward_baselines"]) if "reward_baselines" in inputs else None,
    )


def _moved_inside(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The originals add up a whole padded row; put what stands outside the mask onto its end."""
    outside = torch.where(mask, 0.0, rewards).sum(1)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return rewards.scatter_add(1, last[:, None], outside[:, None])


def _config(case: Case) -> AdvantageConfig:
    params = case["params"] | case["params"].get("config", {})
    renamed = {"norm_adv_by_std_in_grpo": "norm_adv_by_std"}
    return AdvantageConfig(
        **{renamed.get(name, name): value for name, value in params.items() if name != "config"}
    )
