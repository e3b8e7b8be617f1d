"""Promises of rollout importance sampling, for any batch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from streamrl.algorithms.losses import POLICY_LOSSES, LossInput
from streamrl.algorithms.rollout_is import RolloutISStatistics, rollout_is_weights
from streamrl.algorithms.rollout_is.weights import measure_shard
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS
from tests.settings import LossConfig, RolloutISConfig
from tests.unit.algorithms.strategies import Batch, batches, configs, for_any

PERCENTILES = ("_p25", "_p50", "_p75", "_p95", "_p99")


@for_any
@given(batches(), configs())
def test_weights_are_in_bounds_finite_and_detached(batch: Batch, config: RolloutISConfig) -> None:
    train = batch.train.requires_grad_()
    result = rollout_is_weights(train, batch.behavior, batch.sequences, config)
    assert result.keep.shape == train.shape
    assert all(math.isfinite(value) for value in result.metrics.values())
    weights = result.weights
    assert weights is not None
    assert not weights.requires_grad
    assert weights.dtype == torch.float32
    assert config.threshold is not None
    assert bool(((weights >= 0) & (weights <= config.threshold * (1 + 1e-6))).all())
    if config.zeroes_outside:
        assert bool(((weights == 0) | (weights >= config.lower * (1 - 1e-6))).all())


@for_any
@given(batches(), configs())
def test_a_vetoed_sequence_weighs_exactly_zero(batch: Batch, config: RolloutISConfig) -> None:
    assert config.veto_threshold is not None
    result = rollout_is_weights(batch.train, batch.behavior, batch.sequences, config)
    ratio = batch.train.double() - batch.behavior.double()
    low = ratio < math.log(config.veto_threshold)
    vetoed = batch.sequences.expand(batch.sequences.max(low) > 0)
    assert result.weights is not None
    assert not result.weights[vetoed].any()
    fraction = result.metrics.get("mismatch/rollout_is_veto_fraction", 0.0)
    assert (fraction > 0) == bool(vetoed.any())


@for_any
@given(batches(), configs())
def test_weights_and_metrics_do_not_depend_on_the_order_of_sequences(
    batch: Batch, config: RolloutISConfig
) -> None:
    whole = rollout_is_weights(batch.train, batch.behavior, batch.sequences, config)
    backwards = batch.reordered(reversed(range(len(batch.sequences))))
    turned = rollout_is_weights(backwards.train, backwards.behavior, backwards.sequences, config)
    assert whole.weights is not None
    assert turned.weights is not None
    again = Batch(turned.weights, turned.weights, backwards.sequences).reordered(
        reversed(range(len(batch.sequences)))
    )
    torch.testing.assert_close(again.train, whole.weights)
    _assert_same_metrics(turned.metrics, whole.metrics)


@for_any
@given(batches(), configs(), st.integers(1, 3))
def test_empty_sequences_change_nothing(batch: Batch, config: RolloutISConfig, extra: int) -> None:
    """The flat layout's padding: rows without tokens."""
    lengths = [0] * extra + batch.sequences.lengths.tolist() + [0]
    padded = rollout_is_weights(
        batch.train, batch.behavior, Sequences.from_lengths(lengths), config
    )
    plain = rollout_is_weights(batch.train, batch.behavior, batch.sequences, config)
    torch.testing.assert_close(padded.weights, plain.weights)
    _assert_same_metrics(padded.metrics, plain.metrics)


@for_any
@given(batches(), configs(), st.lists(st.integers(0, 8), max_size=3))
def test_metrics_of_uneven_shards_merge_to_those_of_the_whole(
    batch: Batch, config: RolloutISConfig, cuts: list[int]
) -> None:
    staleness = torch.arange(batch.sequences.num_tokens) % 11
    whole = rollout_is_weights(batch.train, batch.behavior, batch.sequences, config, staleness)
    edges = sorted({0, len(batch.sequences), *(min(c, len(batch.sequences)) for c in cuts)})
    merged: RolloutISStatistics | None = None
    for start, stop in zip(edges, edges[1:] or edges, strict=False):
        shard, tokens = batch.part(slice(start, stop))
        statistics = rollout_is_weights(
            shard.train, shard.behavior, shard.sequences, config, staleness[tokens]
        ).statistics
        assert statistics is not None
        sent = statistics.from_tensor(statistics.to_tensor())
        merged = sent if merged is None else merged.merge(sent)
    assert merged is not None
    _assert_same_metrics(merged.metrics(config), whole.metrics)


@for_any
@given(batches(), configs())
def test_float32_and_bfloat16_inputs_are_measured_in_float64(
    batch: Batch, config: RolloutISConfig
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        train, behavior = batch.train.to(dtype), batch.behavior.to(dtype)
        narrow = rollout_is_weights(train, behavior, batch.sequences, config)
        wide = rollout_is_weights(train.double(), behavior.double(), batch.sequences, config)
        assert narrow.weights is not None
        assert wide.weights is not None
        assert narrow.weights.dtype == torch.float32
        torch.testing.assert_close(narrow.weights.double(), wide.weights, rtol=1e-6, atol=1e-6)
        _assert_same_metrics(narrow.metrics, wide.metrics, 1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip"])
def test_fresh_data_of_an_equal_engine_is_plain_ppo(level: str, mode: str) -> None:
    logprobs = -torch.rand(12, dtype=torch.float64)
    sequences = Sequences.from_lengths([5, 0, 7])
    config = RolloutISConfig(level=level, mode=mode)
    result = rollout_is_weights(logprobs, logprobs, sequences, config)
    assert result.weights is not None
    assert bool((result.weights == 1).all())
    assert result.metrics["mismatch/rollout_is_eff_sample_size"] == 1
    assert result.metrics["mismatch/mismatch_kl"] == 0

    current = (logprobs + 0.3 * torch.randn(12, dtype=torch.float64)).requires_grad_()
    plain = LossInput(current, logprobs, torch.randn(12, dtype=torch.float64), None, sequences)
    weighted = replace(plain, importance_weights=result.weights)
    losses = [POLICY_LOSSES["ppo"](batch, LossConfig()).loss for batch in (plain, weighted)]
    gradients = [torch.autograd.grad(loss, current)[0] for loss in losses]
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)


def test_the_threshold_switches_everything_off_and_apply_only_the_weights() -> None:
    train, behavior, sequences = _example()
    off = rollout_is_weights(train, behavior, sequences, ROLLOUT_IS_PRESETS["off"])
    assert off.weights is None
    assert off.metrics == {}
    assert bool(off.keep.all())
    watched = rollout_is_weights(train, behavior, sequences, ROLLOUT_IS_PRESETS["metrics_only"])
    applied = rollout_is_weights(train, behavior, sequences, RolloutISConfig())
    assert watched.weights is None
    raw = {name: value for name, value in applied.metrics.items() if "_applied_" not in name}
    assert len(raw) == len(applied.metrics) - 3
    assert watched.metrics == raw
    assert bool(watched.keep.all())


def test_a_nonfinite_logprob_drops_its_sequence_and_nothing_else() -> None:
    train, behavior, sequences = _example()
    config = RolloutISConfig(level="token")
    clean = rollout_is_weights(train[:4], behavior[:4], Sequences.from_lengths([4]), config)
    for poison in (math.nan, math.inf, -math.inf):
        behavior[5] = poison
        result = rollout_is_weights(train, behavior, sequences, config)
        assert result.weights is not None
        assert clean.weights is not None
        assert torch.equal(result.weights[:4], clean.weights)
        assert not result.weights[4:].any()
        assert result.keep.tolist() == [True] * 4 + [False] * 3
        assert result.metrics == clean.metrics


@pytest.mark.parametrize("poison", [None, math.nan, -math.inf])
@pytest.mark.parametrize("preset", sorted(set(ROLLOUT_IS_PRESETS) - {"off"}))
def test_what_a_gpu_measures_without_waiting_is_the_same(preset: str, poison: float | None) -> None:
    config = ROLLOUT_IS_PRESETS[preset]
    torch.manual_seed(0)
    behavior, sequences = -torch.rand(9).double(), Sequences.from_lengths([4, 0, 2, 3])
    train, staleness = behavior + 0.4 * torch.randn(9), torch.arange(9)
    if poison is not None:
        train[5] = poison
    expected, found = (
        measure_shard(train, behavior, sequences, config, staleness, None, on_gpu=on_gpu)
        for on_gpu in (False, True)
    )
    for name in ("weights", "keep", "vetoed"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.statistics.counts, expected.statistics.counts)
    if poison is None:
        ours, theirs = found.statistics.to_tensor(), expected.statistics.to_tensor()
        torch.testing.assert_close(ours, theirs)
    else:
        assert found.statistics.to_tensor().isnan().sum() == 0


@pytest.mark.parametrize(
    ("level", "log_weights"),
    [("token", [0.2, 0.4, -0.3]), ("sequence", [0.6, 0.6, -0.3]), ("geometric", [0.3, 0.3, -0.3])],
)
def test_a_level_has_the_weight_that_its_name_says(level: str, log_weights: list[float]) -> None:
    train, sequences = torch.tensor([0.2, 0.4, -0.3]).double(), Sequences.from_lengths([2, 1])
    config = RolloutISConfig(level=level, threshold=10.0)
    found = rollout_is_weights(train, torch.zeros(3).double(), sequences, config)
    torch.testing.assert_close(found.weights, torch.tensor(log_weights).double().exp())


def test_of_kept_tokens_none_weighs_nothing() -> None:
    config = RolloutISConfig(mode="mask", threshold=2.0, normalize_by="kept")
    train, sequences = torch.tensor([0.0, 3.0]), Sequences.from_lengths([1, 1])
    _, mask = rollout_is_weights(train, torch.zeros(2), sequences, config).loss_terms(config)
    assert mask.tolist() == [True, False]


def test_what_is_exactly_at_a_bound_stays() -> None:
    ratios = torch.tensor([0.5, 2.0], dtype=torch.float64)
    rules = [{"token_k1": "0.5_2.0"}, {"token_k2": 0.5 * math.log(2.0) ** 2}]
    bounds = {"threshold": 2.0, "threshold_lower": 0.5, "veto_threshold": 0.5}
    config = RolloutISConfig(mode="mask", rejection=rules, **bounds)
    result = rollout_is_weights(
        ratios.log(), torch.zeros(2).double(), Sequences.from_lengths([1, 1]), config
    )
    assert result.keep.all()
    assert torch.equal(result.weights, ratios)
    for beyond in ("ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high"):
        assert result.metrics[f"mismatch/rollout_is_{beyond}"] == 0


def test_a_batch_without_finite_tokens_reports_nothing() -> None:
    nan = torch.full((3,), math.nan)
    result = rollout_is_weights(nan, nan, Sequences.from_lengths([3, 0]), RolloutISConfig())
    assert result.metrics == {}
    assert result.weights is not None
    assert not result.weights.any()
    nothing = torch.zeros(0)
    empty = rollout_is_weights(nothing, nothing, Sequences.from_lengths([]), RolloutISConfig())
    assert empty.metrics == {}


def test_a_tiny_spread_is_not_lost_in_float32() -> None:
    """The one-pass variance in float32 reads 0 here."""
    torch.manual_seed(0)
    behavior = -torch.rand(100_000)
    difference = 1e-4 * torch.randn(100_000)
    train = behavior + difference
    sequences = Sequences.from_lengths([len(train)])
    metrics = rollout_is_weights(train, behavior, sequences, RolloutISConfig()).metrics
    true_std = float((train.double() - behavior.double()).exp().std())
    assert abs(metrics["mismatch/rollout_is_std"] / true_std - 1) < 1e-4


def test_applied_metrics_show_what_the_raw_ones_hide() -> None:
    """Three of four sequences clipped away: raw weights look healthy, applied ones do not."""
    train = torch.tensor([0.0, 0.8, 0.8, 0.8], dtype=torch.float64)
    config = RolloutISConfig(mode="clip", level="sequence")
    sequences = Sequences.from_lengths([1] * 4)
    metrics = rollout_is_weights(train, torch.zeros(4), sequences, config).metrics
    assert metrics["mismatch/rollout_is_eff_sample_size"] > 0.9
    assert metrics["mismatch/rollout_is_applied_eff_sample_size"] == 0.25
    assert metrics["mismatch/rollout_is_applied_zero_fraction"] == 0.75
    assert metrics["mismatch/rollout_is_applied_mean"] == 0.25


def test_staleness_buckets_tell_what_lag_costs() -> None:
    behavior = torch.zeros(7, dtype=torch.float64)
    train = torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    staleness = torch.tensor([0, 1, -1, 2, 4, 8, 9])
    sequences = Sequences.from_lengths([7])
    metrics = rollout_is_weights(train, behavior, sequences, RolloutISConfig(), staleness).metrics
    for bucket in ("0", "1", "2", "3_4", "5_8", "9_plus"):
        size = 2 if bucket == "1" else 1
        assert metrics[f"mismatch/staleness_{bucket}/token_fraction"] == size / 7
    assert metrics["mismatch/staleness_0/eff_sample_size"] == 1
    assert metrics["mismatch/staleness_0/kl"] == 0
    assert metrics["mismatch/staleness_1/clipped_fraction"] == 0.5
    assert metrics["mismatch/staleness_9_plus/kl"] == -2
    assert metrics["mismatch/staleness_1/eff_sample_size"] < 1


def test_batch_normalization_makes_the_mean_weight_one() -> None:
    train, behavior, sequences = _example()
    for level in ("token", "sequence", "geometric"):
        config = RolloutISConfig(level=level, batch_normalize=True, veto_threshold=None)
        result = rollout_is_weights(train, behavior, sequences, config)
        assert result.weights is not None
        units = result.weights if level == "token" else sequences.mean(result.weights)
        assert abs(float(units.mean()) - 1) < 1e-6
        assert "mismatch/rollout_is_batch_norm_factor" in result.metrics


def test_rejection_changes_keep_and_not_the_weights() -> None:
    train = torch.tensor([0.0, 1.0, -1.0, 0.1])
    behavior, sequences = torch.zeros(4), Sequences.from_lengths([2, 2])
    plain = rollout_is_weights(train, behavior, sequences, RolloutISConfig())
    by_token = RolloutISConfig(rejection=[{"token_k1": "0.5_2.0"}])
    kept = rollout_is_weights(train, behavior, sequences, by_token)
    assert kept.keep.tolist() == [True, False, False, True]
    assert torch.equal(kept.weights, plain.weights)
    assert kept.metrics["mismatch/rollout_rs_masked_fraction"] == 0.5
    assert kept.metrics["mismatch/rollout_rs_seq_masked_fraction"] == 1.0
    both = RolloutISConfig(rejection=[{"token_k1": "0.5_2.0"}, {"seq_max_k2": 0.4}])
    assert not rollout_is_weights(train, behavior, sequences, both).keep.any()


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("token_k1", [-1.0, 0.5]),
        ("token_k2", [0.5, 0.125]),
        ("token_k3", [math.e - 2, math.exp(-0.5) - 0.5]),
        ("seq_sum_k1", [-0.5, -0.5]),
        ("seq_mean_k2", [0.3125, 0.3125]),
        ("seq_max_k3", [math.e - 2, math.e - 2]),
    ],
)
def test_rejection_statistics_are_what_their_names_say(
    statistic: str, expected: list[float]
) -> None:
    train = torch.tensor([1.0, -0.5], dtype=torch.float64)
    config = RolloutISConfig(rejection=[{statistic: 3.0}])
    sequences = Sequences.from_lengths([2])
    metrics = rollout_is_weights(train, torch.zeros(2), sequences, config).metrics
    assert metrics[f"mismatch/rollout_rs_{statistic}_max"] == pytest.approx(max(expected))
    assert metrics[f"mismatch/rollout_rs_{statistic}_min"] == pytest.approx(min(expected))
    mean = sum(expected) / len(expected)
    assert metrics[f"mismatch/rollout_rs_{statistic}_mean"] == pytest.approx(mean)


def test_loss_terms_count_all_tokens_or_only_those_kept() -> None:
    train = torch.tensor([0.0, 1.0, -1.0, 0.1])
    behavior, sequences = torch.zeros(4), Sequences.from_lengths([2, 2])
    rules = [{"token_k1": "0.5_2.0"}]
    everything = RolloutISConfig(rejection=rules)
    weights, mask = rollout_is_weights(train, behavior, sequences, everything).loss_terms(
        everything
    )
    assert mask is None
    assert weights is not None
    assert (weights > 0).tolist() == [True, False, False, True]
    kept = RolloutISConfig(rejection=rules, normalize_by="kept", mode="clip")
    weights, mask = rollout_is_weights(train, behavior, sequences, kept).loss_terms(kept)
    assert mask is not None
    assert mask.tolist() == [True, False, False, True]
    silent = RolloutISConfig(apply=False)
    terms = rollout_is_weights(train, behavior, sequences, silent).loss_terms(silent)
    assert terms == (None, None)


def test_inputs_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="behavior_logprobs"):
        rollout_is_weights(
            torch.zeros(3), torch.zeros(4), Sequences.from_lengths([3]), RolloutISConfig()
        )


def _example() -> tuple[Tensor, Tensor, Sequences]:
    torch.manual_seed(1)
    behavior = -torch.rand(7)
    return behavior + 0.4 * torch.randn(7), behavior, Sequences.from_lengths([4, 3])


def _assert_same_metrics(
    ours: dict[str, float], whole: dict[str, float], tolerance: float = 1e-6
) -> None:
    assert ours.keys() == whole.keys()
    for name, value in whole.items():
        allowed = 1e-2 if name.endswith(PERCENTILES) else tolerance
        assert math.isclose(ours[name], value, rel_tol=allowed, abs_tol=1e-9), name
