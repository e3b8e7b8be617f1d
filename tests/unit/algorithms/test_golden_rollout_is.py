"""Rollout-IS weights and metrics agree with what verl's functions gave."""

from typing import Any

import pytest

from streamrl.algorithms.rollout_is import rollout_is_weights
from tests.settings import RolloutISConfig
from tests.unit.algorithms.golden import Case, Padded, assert_agrees, cases, close

EMPTY = "the original counts an empty sequence as one of ratio 0 and perplexity 1"
SEQUENCE_MEANS = (
    "log_ppl_abs_diff",
    "log_ppl_diff",
    "ppl_ratio",
    "rollout_log_ppl",
    "rollout_ppl",
    "training_log_ppl",
    "training_ppl",
)
MISMATCH_MEANS = tuple(f"mismatch_{name}" for name in SEQUENCE_MEANS)
DEVIATIONS = {
    "rollout_is_v0/00814": dict.fromkeys(
        (
            *MISMATCH_MEANS,
            "rollout_is_seq_clipped_fraction",
            "rollout_is_seq_fraction_high",
            "rollout_is_seq_fraction_low",
            "rollout_is_seq_mean",
            "rollout_is_seq_min",
            "rollout_is_seq_std",
        ),
        EMPTY,
    ),
    "rollout_is_v0/00821": dict.fromkeys(
        (
            *MISMATCH_MEANS,
            "rollout_is_ratio_fraction_high",
            "rollout_is_seq_fraction_high",
            "rollout_is_seq_fraction_low",
            "rollout_is_seq_mean",
            "rollout_is_seq_min",
            "rollout_is_seq_std",
        ),
        EMPTY,
    ),
    "rollout_is_v0/00809": dict.fromkeys(
        (
            *MISMATCH_MEANS,
            "rollout_is_seq_clipped_fraction",
            "rollout_is_seq_fraction_low",
            "rollout_is_seq_mean",
            "rollout_is_seq_std",
            "rollout_is_veto_fraction",
        ),
        EMPTY,
    ),
    "rollout_corr_v3/00295": dict.fromkeys(
        (*SEQUENCE_MEANS, "chi2_seq", "log_ppl_diff_min", "rollout_rs_seq_masked_fraction"), EMPTY
    ),
}

NOT_REPORTED = ("_std", "_seq_mean", "_seq_max", "_seq_min", "_seq_max_deviation")
NOT_REPORTED_FRACTIONS = ("_seq_fraction_high", "_seq_fraction_low")


@pytest.mark.parametrize("case", cases("rollout_is_v0"), ids=lambda case: case["id"])
def test_weights_and_metrics_agree(case: Case) -> None:
    padded, params = Padded(case), case["params"]
    config = RolloutISConfig(
        **{name.removeprefix("rollout_is_"): value for name, value in params.items()}
    )
    train, behavior = padded.flat("old_log_prob"), padded.flat("rollout_log_prob")
    result = rollout_is_weights(train, behavior, padded.sequences, config)
    pairs: dict[str, tuple[Any, Any]] = {
        name.removeprefix("mismatch/"): (result.metrics[name], recorded)
        for name, recorded in case["metrics"].items()
    }
    pairs |= {"weights": (result.weights, padded.flatten(case["out"]["weights"]))}
    assert_agrees(case, pairs, DEVIATIONS)
    assert bool(result.keep.all())


@pytest.mark.parametrize("case", cases("rollout_is_v0"), ids=lambda case: case["id"])
def test_merged_statistics_give_the_same_metrics(case: Case) -> None:
    """Read off the histogram, percentiles are within a percent; everything else is exact."""
    padded, params = Padded(case), case["params"]
    config = RolloutISConfig(
        **{name.removeprefix("rollout_is_"): value for name, value in params.items()}
    )
    train, behavior = padded.flat("old_log_prob"), padded.flat("rollout_log_prob")
    result = rollout_is_weights(train, behavior, padded.sequences, config)
    assert result.statistics is not None
    merged = result.statistics.metrics(config)
    assert merged.keys() == result.metrics.keys()
    for name, value in result.metrics.items():
        tolerance = 1e-2 if name.split("_p")[-1].isdigit() else 1e-9
        assert close(merged[name], value, tolerance), name


@pytest.mark.parametrize("case", cases("rollout_corr_v3"), ids=lambda case: case["id"])
def test_rejection_agrees(case: Case) -> None:
    padded, params = Padded(case), case["params"]
    config = RolloutISConfig(
        threshold=None,
        rejection=[{params["rollout_rs"]: params["rollout_rs_threshold"]}],
    )
    train, behavior = padded.flat("old_log_prob"), padded.flat("rollout_log_prob")
    result = rollout_is_weights(train, behavior, padded.sequences, config)
    assert result.weights is None
    assert not any(name.startswith("mismatch/rollout_is_") for name in result.metrics)
    pairs: dict[str, tuple[Any, Any]] = {
        name.removeprefix("rollout_corr/"): (_ours(result.metrics, name), recorded)
        for name, recorded in case["metrics"].items()
        if not _is_left_out(name)
    }
    pairs |= {"mask": (result.keep, padded.flatten(case["out"]["mask"]))}
    assert_agrees(case, pairs, DEVIATIONS)


def _ours(metrics: dict[str, float], recorded_name: str) -> float:
    """The newer verl dropped the `mismatch_` of the older names."""
    name = recorded_name.removeprefix("rollout_corr/")
    plain = f"mismatch/{name}"
    return metrics[plain] if plain in metrics else metrics[f"mismatch/mismatch_{name}"]


def _is_left_out(name: str) -> bool:
    """Per rule we report mean, extremes and fractions, not a second summary by sequence."""
    is_rule = "rollout_rs_" in name
    return is_rule and name.endswith((*NOT_REPORTED, *NOT_REPORTED_FRACTIONS))
