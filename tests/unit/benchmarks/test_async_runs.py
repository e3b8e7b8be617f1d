"""The pure parts of bench_async: lengths, buckets, ratios, tables and the task."""

from pathlib import Path

import numpy as np
import pytest

from streamrl.interfaces import Episode
from streamrl.types import FinishReason
from tests.benchmarks.async_runs.figures import figures, seconds_to, with_ratios
from tests.benchmarks.async_runs.held_out import by_bucket
from tests.benchmarks.async_runs.lengths import ks_distance, ks_p_value
from tests.benchmarks.async_runs.records import RunRecord, read_sampled
from tests.benchmarks.async_runs.spans import TURN, HeldOutSpans, Spans, exact_match
from tests.benchmarks.async_runs.table import tables

TAIL = {"min_length": 4, "max_length": 96, "tail": 1.6}


def line(mode: str, seconds: float, rewards: list[float], **others: object) -> dict[str, object]:
    points = [
        {"step": i, "seconds": seconds * i, "reward": r, "exact": {"4-10": 1.0, "41-96": r}}
        for i, r in enumerate(rewards)
    ]
    named = {"workload": "long-tailed", "seed": 0, "steps": 2, "mode": mode, "seconds": seconds}
    return {**named, "curve": points, **others}


def test_the_p_value_is_that_of_the_formula():
    # (sqrt(50) + 0.12 + 0.11 / sqrt(50)) * 0.2 = 1.441, and 2 * exp(-2 * 1.441**2) = 0.0314.
    assert ks_distance(range(100), range(20, 120)) == pytest.approx(0.2)
    assert ks_p_value(range(100), range(20, 120)) == pytest.approx(0.0314, abs=5e-4)


def test_p_values_of_one_distribution_are_not_small():
    rng = np.random.default_rng(0)
    draws = [rng.geometric(0.01, (2, 400)) for _ in range(200)]
    small = sum(ks_p_value(first, second) < 0.05 for first, second in draws)
    assert small <= 20


def test_samples_without_the_long_ones_are_told_apart():
    lengths = np.random.default_rng(0).geometric(0.05, 2000)
    assert ks_p_value(lengths[lengths < 40], lengths) < 0.001


def test_a_prompt_is_a_function_of_seed_and_index():
    first, again, other = Spans(0, **TAIL), Spans(0, **TAIL), Spans(1, **TAIL)
    prompts = [first[i] for i in range(200)]
    assert prompts == [again[i] for i in reversed(range(200))][::-1]
    assert prompts != [other[i] for i in range(200)]


def test_long_answers_go_down_and_all_end_as_the_prompt_says():
    prompts = [Spans(0, **TAIL)[i] for i in range(500)]
    assert {p.content[0] for p in prompts if len(p.answer) > TURN} == {"<"}
    assert {p.content[0] for p in prompts if len(p.answer) <= TURN} == {">"}
    assert all(p.content[1:] == p.answer[0] + p.answer[-1] + "=" for p in prompts)


def test_no_prompt_is_trained_and_held_out():
    buckets = ((4, 10), (11, 40), (41, 96))
    held_out = [HeldOutSpans(0, buckets)[i] for i in range(384)]
    assert {p.content for p in held_out}.isdisjoint(
        Spans(0, **TAIL)[i].content for i in range(3000)
    )
    lengths = [len(p.answer) for p in held_out]
    assert all(
        shortest <= n <= longest
        for i, (shortest, longest) in enumerate(buckets)
        for n in lengths[i::3]
    )


def test_the_reward_logs_what_was_sampled(tmp_path: Path):
    prompts, log = Spans(0, **TAIL), tmp_path / "log.jsonl"
    episodes = [
        Episode(prompts[7], response, len(response) + 1, FinishReason.STOP)
        for response in (prompts[7].answer, "01")
    ]
    assert exact_match(episodes, log=str(log)) == [1.0, 0.0]
    assert read_sampled(log, prompts) == {7: [len(prompts[7].answer) + 1, 3]}
    with pytest.raises(ValueError, match="prompt 7 was"):
        read_sampled(log, Spans(1, **TAIL))


def test_figures_say_what_was_not_trained():
    prompts = Spans(0, **TAIL)
    waits = {"learner/wait_s": 0.5, "learner/wait_due_s": 0.25}
    metrics = [
        {"time_s": time_s, **waits, "buffer/staleness_max": 2} for time_s in (10.0, 11.0, 14.0)
    ]
    trained = [0, 1, 2, 4, 5, 7]
    sampled = {i: [len(prompts[i].answer) + 1] * 2 for i in (*trained, 3)}
    result = figures(RunRecord(metrics, trained, {3: "stale"}, sampled), prompts)
    assert (result["seconds"], result["staleness_max"]) == (4.0, 2)
    assert (result["wait_s"], result["wait_due_s"]) == (1.0, 0.5)
    assert (result["groups_trained"], result["trained_twice"], result["unfinished"]) == (6, 0, 0)
    assert result["dropped"] == {"stale": 1}
    assert result["dropped_answer_length_mean"] == len(prompts[3].answer)
    assert result["trained_tokens"] == sum(2 * (len(prompts[i].answer) + 1) for i in trained)


def test_buckets_take_turns():
    result = by_bucket([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], ["a", "b", "c"])
    assert result == {"reward": 0.5, "exact": {"a": 1.0, "b": 0.0, "c": 0.5}}


def test_ratios_are_to_the_faster_synchronous_run():
    lines = [
        line("sync_one_engine", 8.0, [0.2, 0.6]),
        line("sync_more_engines", 6.0, [0.2, 0.4]),
        line("wait_2", 3.0, [0.2, 0.6]),
        line("drop_2", 2.0, [0.2, 0.3]),
    ]
    one, more, wait, drop = with_ratios(lines)
    assert [each["ratio"] for each in (one, more, wait, drop)] == [0.75, 1.0, 2.0, 3.0]
    # Both synchronous runs reach 0.4: the first after 4 s, the second after 6 s.
    assert (one["seconds_to_reward"], more["seconds_to_reward"]) == (4.0, 6.0)
    assert (wait["seconds_to_reward"], wait["ratio_to_reward"]) == (1.5, 2.67)
    assert (drop["seconds_to_reward"], drop["ratio_to_reward"]) == (None, None)


def test_a_reward_that_the_start_has_takes_no_time():
    points = [{"seconds": 0.0, "reward": 0.5}, {"seconds": 10.0, "reward": 0.6}]
    assert seconds_to(points, 0.4) == 0.0


def test_a_row_of_the_table_is_the_mean_of_the_seeds():
    lines = [
        line("wait_2", 3.0, [0.2, 0.6], dropped={}, ks_p=0.9),
        {**line("wait_2", 5.0, [0.2, 0.4], dropped={}, ks_p=0.5), "seed": 1},
        line("drop_2", 2.0, [0.2, 0.3], dropped={"stale": 4}, dropped_answer_length_mean=61.5),
    ]
    heading, _, names, _, wait, drop = tables(lines).splitlines()
    assert heading == "long-tailed: 2 steps, 2 seeds; at the start 1 of 4-10, 0.2 of 41-96"
    cells = [dict(zip(names.split(" | "), row.split(" | "), strict=True)) for row in (wait, drop)]
    assert [row["seconds"] for row in cells] == ["4", "2"]
    assert [row["dropped (answer length)"] for row in cells] == ["0", "4 (61.5)"]
    assert [row["KS p, smallest"] for row in cells] == ["0.5", "-"]
    assert [row["exact, 41-96 |"] for row in cells] == ["0.5 |", "0.3 |"]
