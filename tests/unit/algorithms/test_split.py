"""Engine mismatch and policy lag told apart: numbers by hand in float64, and bounds of each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.rollout_is import RolloutIS, rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings

UNKNOWN = math.nan
BEHAVIOR = (0.5, 0.4, 0.2, 0.5)
"""Probabilities of the four tokens of two responses, under the engine,"""
RESCORED = (0.6, 0.1, 0.2, UNKNOWN)
"""under the learner at the version that sampled them,"""
CURRENT = (0.3, 0.4, 0.1, 0.25)
"""and under the learner now."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weigh(rescored: tuple[float, ...] | None = RESCORED, **settings: Any) -> RolloutIS:
    return rollout_is_weights(
        tensor(*CURRENT).log(),
        tensor(*BEHAVIOR).log(),
        Sequences.from_lengths([3, 1]),
        RolloutISSettings(**settings),
        rescored_logprobs=None if rescored is None else tensor(*rescored).log(),
    )


def k3(*ratios: float) -> float:
    return sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)


def test_the_two_factors_are_measured_apart() -> None:
    """Engine 6/5, 1/4, 1 and lag 1/2, 4, 1/2: their products are the ratios 3/5, 1 and 1/2."""
    metrics = weigh(threshold=None, rejection=({"token_k3": 9.0},)).metrics
    expected = {
        "mismatch/rescored_frac": 3 / 4,
        "mismatch/engine_kl": -(math.log(6 / 5) + math.log(1 / 4)) / 3,
        "mismatch/lag_kl": -(2 * math.log(1 / 2) + math.log(4)) / 3,
        "mismatch/engine_k3_kl": k3(6 / 5, 1 / 4, 1),
        "mismatch/lag_k3_kl": k3(1 / 2, 4, 1 / 2),
    }
    found = {name: metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    of_ratios = -(math.log(3 / 5) + math.log(1) + math.log(1 / 2)) / 3
    assert found["mismatch/engine_kl"] + found["mismatch/lag_kl"] == pytest.approx(of_ratios)
    assert not any(name.endswith("_bounded_fraction") for name in metrics)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, (0.6, 1, 0.5, 0.5)),
        ({"engine_threshold": 1.1}, (1.1 / 2, 1, 0.5, 0.5)),
        ({"lag_threshold": 2.0}, (0.6, 2 / 4, 0.5, 0.5)),
        ({"engine_threshold": 1.1, "lag_threshold": 2.0}, (1.1 / 2, 2 / 4, 0.5, 0.5)),
        ({"lag_threshold": 2.0, "threshold": 0.55}, (0.55, 2 / 4, 0.5, 0.5)),
        ({"lag_threshold": 2.0, "level": "sequence"}, (0.15, 0.15, 0.15, 0.5)),
    ],
)
def test_truncation_caps_each_factor_and_then_their_product(settings, weights) -> None:
    found = weigh(threshold_lower=0.1, **settings)
    assert found.weights is not None
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-12)
    assert found.keep.all()


@pytest.mark.parametrize(
    ("settings", "keep", "bounded"),
    [
        ({"engine_threshold": 2.0}, (True, False, True, True), {"engine": 1 / 3}),
        ({"lag_threshold": 3.0}, (True, False, True, True), {"lag": 1 / 3}),
        ({"lag_threshold": 1.5}, (False, False, False, True), {"lag": 1.0}),
        (
            {"engine_threshold": 1.1, "lag_threshold": 3.0},
            (False, False, True, True),
            {"engine": 2 / 3, "lag": 1 / 3},
        ),
    ],
)
def test_a_mask_takes_out_a_token_whose_factors_hide_each_other(settings, keep, bounded) -> None:
    """The ratio of the second token is 1, which no bound of the ratio alone can take out."""
    found = weigh(mode="mask", threshold=5.0, **settings)
    assert found.keep.tolist() == list(keep)
    _, mask = found.loss_terms(RolloutISSettings(normalize_by="kept"))
    assert mask is not None
    assert mask.tolist() == list(keep)
    for name in ("engine", "lag"):
        share = found.metrics.get(f"mismatch/{name}_bounded_fraction")
        assert share == (None if name not in bounded else pytest.approx(bounded[name]))


def test_without_rescored_tokens_nothing_is_said_and_nothing_bounded() -> None:
    plain = weigh(None, engine_threshold=1.1)
    unknown = weigh((UNKNOWN,) * 4, engine_threshold=1.1)
    assert unknown.metrics == plain.metrics | {"mismatch/rescored_frac": 0.0}
    assert plain.weights is not None
    assert unknown.weights is not None
    assert torch.equal(plain.weights, unknown.weights)


def test_a_sequence_that_is_not_finite_is_in_no_factor() -> None:
    current = tensor(*CURRENT).log()
    current[3] = math.nan
    found = rollout_is_weights(
        current,
        tensor(*BEHAVIOR).log(),
        Sequences.from_lengths([3, 1]),
        RolloutISSettings(),
        rescored_logprobs=tensor(*RESCORED).log(),
    )
    assert found.metrics["mismatch/rescored_frac"] == 1
    assert found.metrics["mismatch/engine_k3_kl"] == pytest.approx(k3(6 / 5, 1 / 4, 1))
