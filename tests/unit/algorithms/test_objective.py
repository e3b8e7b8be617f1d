"""The objective adds up its terms; the proximal policy stands where its mode says."""

import pytest
import torch

from streamrl.algorithms.losses import POLICY_LOSSES, LossInput
from streamrl.algorithms.objective import policy_objective, proximal_logprobs
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm import AlgorithmSettings
from tests.settings import LossConfig


def test_the_objective_is_the_weighted_sum_of_its_terms() -> None:
    batch = _batch()
    reference, entropy = torch.full((3,), -1.5), torch.tensor([1.0, 2.0, 3.0])
    config = AlgorithmSettings.model_validate(
        {
            "loss": "ppo",
            "rl_loss_coef": 0.5,
            "entropy_coef": 0.1,
            "sft_coef": 0.2,
            "kl_loss": {"coef": 0.3, "kind": "k2"},
        }
    )
    output = policy_objective(batch, config, reference_logprobs=reference, entropy=entropy)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    kl = (0.5 * (batch.logprobs - reference) ** 2).mean().item()
    sft = (-batch.logprobs[:2].sum() / 3).item()
    policy = POLICY_LOSSES["ppo"](batch, LossConfig()).loss.item()
    assert metrics["actor/pg_loss"] == pytest.approx(policy)
    assert metrics["actor/kl_loss"] == pytest.approx(kl)
    assert metrics["actor/sft_loss"] == pytest.approx(sft)
    assert metrics["actor/entropy"] == pytest.approx(2.0)
    expected = 0.5 * policy + 0.3 * kl - 0.1 * 2.0 + 0.2 * sft
    assert output.loss.item() == pytest.approx(expected)
    assert metrics["actor/loss"] == pytest.approx(expected)


def test_terms_without_coefficient_need_no_inputs() -> None:
    output = policy_objective(_batch(), AlgorithmSettings())
    assert set(output.metrics) == {
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/pg_loss",
        "actor/loss",
    }


def test_the_exact_kl_enters_as_given() -> None:
    section = {"kl_loss": {"coef": 2.0, "kind": "full"}, "rl_loss_coef": 0.0}
    config = AlgorithmSettings.model_validate(section)
    output = policy_objective(_batch(), config, exact_kl=torch.tensor([1.0, 2.0, 3.0]))
    assert output.loss.item() == pytest.approx(4.0)


def test_the_loglinear_proximal_policy_lies_between_as_far_as_the_versions_say() -> None:
    current = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    behavior, staleness = torch.full((3,), -1.0), torch.tensor([0, 1, -3])
    between = proximal_logprobs("loglinear", current, behavior, staleness)
    assert between.tolist() == [-1.0, -0.5, -0.25]
    assert not between.requires_grad
    assert torch.equal(proximal_logprobs("behavior", current, behavior, staleness), behavior)


def test_without_a_proximal_policy_the_ratio_of_the_loss_is_the_correction() -> None:
    assert not AlgorithmSettings(proximal="recompute").ratio_holds_correction
    assert AlgorithmSettings(proximal="behavior", loss="ppo").ratio_holds_correction
    assert not AlgorithmSettings(proximal="behavior", loss="reinforce").ratio_holds_correction


def _batch() -> LossInput:
    logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    return LossInput(
        logprobs,
        torch.tensor([-1.1, -0.9, -1.9]),
        torch.tensor([1.0, -1.0, 0.5]),
        None,
        Sequences.from_lengths([2, 1]),
        rewards=torch.tensor([1.0, 0.0]),
    )
