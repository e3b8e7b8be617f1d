"""The lengths of what is trained are compared with those of what is sampled, step by step."""

import logging
import math

import pytest
from msgspec import structs

from learners.fairness import FairnessWindow
from streamrl.metrics import fairness_metrics
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GroupHeader,
    LengthHistogram,
    OverduePolicy,
    ResponseLengths,
)

SHORT, LONG = 5, 160


def stats(
    sampled: dict[int, int],
    trained: dict[int, int],
    stale: dict[int, int] | None = None,
    max_staleness: int = 2,
    overdue: OverduePolicy = OverduePolicy.DROP,
) -> BufferStats:
    return BufferStats(
        incarnation="i",
        policy_version=0,
        groups_per_step=1,
        max_staleness=max_staleness,
        staleness_bound=max_staleness,
        overdue=overdue,
        books=Books(),
        lengths=ResponseLengths(
            LengthHistogram.of(sampled).rounded(),
            LengthHistogram.of(trained).rounded(),
            {DropReason.STALE: LengthHistogram.of(stale).rounded()} if stale else {},
        ),
    )


def totals(num_steps: int, dropped_a_step: int) -> BufferStats:
    """After steps that sampled 90 short responses and 10 long ones each and dropped long ones."""
    return stats(
        {SHORT: 90 * num_steps, LONG: 10 * num_steps},
        {SHORT: 90 * num_steps, LONG: (10 - dropped_a_step) * num_steps},
        {LONG: dropped_a_step * num_steps} if dropped_a_step else None,
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_the_metrics_name_what_was_dropped():
    lengths = stats({4: 6, 12: 2}, {4: 6}, {12: 2}).lengths
    metrics = fairness_metrics(lengths)
    assert metrics["fairness/sampled_length_mean"] == 6.0
    assert metrics["fairness/sampled_length_p99"] == 12
    assert metrics["fairness/trained_length_mean"] == 4.0
    assert metrics["fairness/trained_length_p99"] == 4
    assert metrics["fairness/dropped_length_mean"] == 12.0
    assert metrics["fairness/dropped_length_p99"] == 12
    assert metrics["fairness/length_distance"] == pytest.approx(0.25)
    assert metrics["fairness/dropped_tokens_frac"] == 0.5
    assert metrics["fairness/dropped_stale_tokens_frac"] == 0.5
    assert metrics["fairness/dropped_failed_tokens_frac"] == 0.0


def test_every_step_has_the_same_metrics():
    nothing = fairness_metrics(ResponseLengths())
    assert set(nothing) == set(fairness_metrics(totals(1, 5).lengths))
    assert set(nothing.values()) == {0}


def test_a_window_forgets_what_is_older():
    window = FairnessWindow(stats({}, {}), group_size=1)
    assert window.num_steps == 50
    for step in range(1, 51):
        metrics = window.metrics(stats({SHORT: step}, {SHORT: step}), 1.0)
    assert metrics["fairness/sampled_length_mean"] == SHORT
    for step in range(1, 50):
        metrics = window.metrics(stats({SHORT: 50, 10: step}, {SHORT: 50, 10: step}), 1.0)
    assert metrics["fairness/sampled_length_mean"] == pytest.approx((SHORT + 49 * 10) / 50)
    metrics = window.metrics(stats({SHORT: 50, 10: 50}, {SHORT: 50, 10: 50}), 1.0)
    assert metrics["fairness/sampled_length_mean"] == 10


def test_a_window_is_long_beside_what_is_in_flight():
    assert FairnessWindow(stats({}, {}, max_staleness=8), group_size=1).num_steps == 90


def test_what_was_counted_before_the_learner_attached_is_not_in_the_window():
    window = FairnessWindow(totals(1000, 10), group_size=1)
    metrics = window.metrics(totals(1000, 10), 1.0)
    assert metrics["fairness/sampled_length_mean"] == 0
    assert metrics["fairness/dropped_tokens_frac"] == 0


def test_a_buffer_that_lost_its_memory_begins_a_new_window():
    window = FairnessWindow(stats({}, {}), group_size=1)
    window.metrics(stats({SHORT: 100}, {SHORT: 90}), 1.0)
    assert window.metrics(stats({LONG: 10}, {}), 1.0)["fairness/sampled_length_mean"] == 0
    metrics = window.metrics(stats({LONG: 10, SHORT: 2}, {SHORT: 2}), 1.0)
    assert metrics["fairness/sampled_length_mean"] == SHORT


def test_trained_responses_that_are_shorter_are_reported_once_a_window(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    for step in range(1, 52):
        window.metrics(totals(step, 5), 1.0)
    first, second = warnings(caplog)
    assert first == (
        "over the last 1 steps trained responses have 13.2 tokens in the mean, sampled ones 20.5: "
        "39.0 % of the tokens were dropped with groups that grew too old; set buffer.overdue: "
        "train or wait"
    )
    assert second.startswith("over the last 50 steps")


def test_siblings_that_were_dropped_together_are_no_evidence(caplog):
    window = FairnessWindow(stats({}, {}), group_size=8)
    for num_groups in (1, 2):
        eight = {LONG: 8 * num_groups}
        window.metrics(stats({SHORT: 400, **eight}, {SHORT: 400}, eight), 1.0)
        assert warnings(caplog) == []
    window.metrics(stats({SHORT: 400, LONG: 24}, {SHORT: 400}, {LONG: 24}), 1.0)
    assert len(warnings(caplog)) == 1


def test_what_waits_is_not_reported_and_neither_is_a_drop_as_long_as_the_others(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    window.metrics(stats({SHORT: 900, LONG: 100}, {SHORT: 900}), 1.0)
    window.metrics(
        stats({SHORT: 900, LONG: 100}, {SHORT: 450, LONG: 50}, {SHORT: 450, LONG: 50}), 1.0
    )
    assert warnings(caplog) == []


def test_a_twentieth_of_the_mean_is_not_reported(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    window.metrics(stats({100: 1000, 110: 50}, {100: 1000}, {110: 50}), 1.0)
    assert warnings(caplog) == []


def test_the_remedy_is_named_where_there_is_one(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    window.metrics(
        stats({SHORT: 90, LONG: 10}, {SHORT: 90}, {LONG: 10}, overdue=OverduePolicy.WAIT), 1.0
    )
    (warning,) = warnings(caplog)
    assert warning.endswith("dropped with groups that grew too old")


def test_the_tokens_that_are_sampled_per_second_are_those_of_each_step():
    """Of whole responses, so that a run shorter than a heartbeat has a rate."""
    window = FairnessWindow(stats({}, {}), 1)
    assert window.metrics(stats({SHORT: 10}, {}), 0.1)["generator/tokens_per_s"] == 500.0
    assert window.metrics(stats({SHORT: 10}, {}), 0.1)["generator/tokens_per_s"] == 0.0
    lost = window.metrics(stats({SHORT: 4}, {}), 0.1)["generator/tokens_per_s"]
    assert math.isnan(lost), "a buffer that lost its memory does not count what came before"
    assert window.metrics(stats({SHORT: 6}, {}), 0.5)["generator/tokens_per_s"] == 20.0


def header(num_kept: int, *discarded: int) -> GroupHeader:
    return GroupHeader(
        group_id="g",
        prompt_index=0,
        environment="e",
        oldest_version=0,
        newest_version=0,
        lengths=(SHORT + 1,) * num_kept,
        response_lengths=(SHORT,) * num_kept,
        rewards=(0.0,) * num_kept,
        discarded_lengths=discarded,
    )


def test_siblings_that_are_not_kept_count_as_sampled_and_their_length_is_compared(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    metrics = window.metrics(
        stats({SHORT: 90}, {SHORT: 90}), 1.0, [header(3, LONG, LONG) for _ in range(30)]
    )
    assert metrics["fairness/sampled_length_mean"] == (90 * SHORT + 60 * LONG) / 150
    assert metrics["fairness/discarded_tokens_frac"] == 60 * LONG / (90 * SHORT + 60 * LONG)
    (warning,) = warnings(caplog)
    assert warning.endswith(
        "as siblings beyond generator.group_size; set generator.oversample.keep: each_reward"
    )


def test_groups_that_are_left_out_for_their_rewards_are_named(caplog):
    window = FairnessWindow(stats({}, {}), group_size=1)
    uniform = {DropReason.UNIFORM: LengthHistogram.of({LONG: 60}).rounded()}
    after = structs.replace(
        stats({SHORT: 90, LONG: 60}, {SHORT: 90}),
        lengths=ResponseLengths(
            LengthHistogram.of({SHORT: 90, LONG: 60}).rounded(),
            LengthHistogram.of({SHORT: 90}).rounded(),
            uniform,
        ),
    )
    assert window.metrics(after, 1.0)["fairness/dropped_uniform_tokens_frac"] > 0.9
    (warning,) = warnings(caplog)
    assert warning.endswith("rewards are all alike, as algorithm.dynamic_sampling says")
