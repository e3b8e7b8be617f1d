"""mean@k, pass@k and majority@k, by data source."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from actors.validation import PromptResult, majority, pass_at, scores, sizes, vote
from streamrl.types.validation import MAX_METRICS


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_chance_of_a_draw_without_replacement(num_samples, data):
    num_passed = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    draws = list(itertools.combinations(range(num_samples), k))
    passing = sum(any(i < num_passed for i in draw) for draw in draws)
    assert math.isclose(pass_at(num_samples, num_passed, k), passing / len(draws))


def test_the_majority_is_of_answers_and_ties_count_alike():
    assert majority(PromptResult("", (0.0, 1.0, 1.0), ("3", "7", "7"))) == 1.0
    assert majority(PromptResult("", (1.0, 0.0, 0.0), ("3", "7", "7"))) == 0.0
    assert majority(PromptResult("", (1.0, 0.0), ("3", "7"))) == 0.5


def test_metrics_are_by_data_source_and_over_all_prompts():
    results = [
        PromptResult("math", (1.0, 0.0), ("7", "8")),
        PromptResult("math", (0.0, 0.0), ("1", "1")),
        PromptResult("code", (1.0, 1.0), ("x", "x")),
    ]
    found = scores(results, 2, pass_reward=1.0)
    assert found["validation/mean@2"] == 0.5
    assert found["validation/math/mean@2"] == 0.25
    assert found["validation/math/pass@1"] == 0.25
    assert found["validation/math/pass@2"] == 0.5
    assert found["validation/math/majority@2"] == 0.25
    assert found["validation/code/majority@2"] == 1.0
    assert found["validation/code/num_prompts"] == 1


def test_one_sample_has_no_majority_and_pass_is_by_the_reward_that_is_asked_for():
    found = scores([PromptResult("", (0.4,), ("a",)), PromptResult("", (0.9,), ("b",))], 1, 0.5)
    assert found == {
        "validation/mean@1": 0.65,
        "validation/pass@1": 0.5,
        "validation/num_prompts": 2.0,
    }


def test_a_response_passes_by_a_sum_that_rounding_has_made_smaller():
    reward = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
    assert reward < 1.0
    assert scores([PromptResult("", (reward,), ("a",))], 1, 1.0)["validation/pass@1"] == 1.0


@pytest.mark.parametrize("num_samples", [1, 8, 64])
def test_a_report_of_any_number_of_sources_fits_into_a_message(num_samples):
    results = [
        PromptResult(f"source-{i}", (0.0,) * num_samples, ("",) * num_samples) for i in range(500)
    ]
    found = scores(results, num_samples, 1.0)
    assert len(found) <= MAX_METRICS - len(sizes(num_samples))
    assert found["validation/num_prompts"] == 500


def test_extracted_answers_vote_by_their_values():
    assert vote("1,007.0") == vote("1007")
    assert vote(r"\frac{1}{2}") == vote("0.5") == vote("1/2")
    assert vote(r"\text{Left}") == vote("left")
    assert vote("2x + 1") == vote("2x+1") != vote("3x+1")
    assert vote("") == ""
