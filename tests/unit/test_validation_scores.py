"""mean@k, pass@k and majority@k, by data source."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.validation.scores import PromptResult, answer_of, majority, pass_at, scores, sizes
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


@pytest.mark.parametrize("num_samples", [1, 8, 64])
def test_a_report_of_any_number_of_sources_fits_into_a_message(num_samples):
    results = [
        PromptResult(f"source-{i}", (0.0,) * num_samples, ("",) * num_samples) for i in range(500)
    ]
    found = scores(results, num_samples, 1.0)
    assert len(found) <= MAX_METRICS - len(sizes(num_samples))
    assert found["validation/num_prompts"] == 500


def test_answers_of_a_numeric_reward_are_numbers():
    numeric, exact = answer_of({"numeric_answer", "format"}), answer_of(["exact_match"])
    assert numeric("so 1,007.0") == numeric("#### 1007")
    assert numeric("none ") == "none"
    assert exact(" so 7 ") == "so 7"


def test_no_number_of_a_thought_votes():
    numeric = answer_of(["numeric_answer"])
    assert numeric("<think>7 or 8, maybe 9") != numeric("<think>6 and then 9")
    assert numeric("<think>7 or 8</think>9") == numeric("<think>6</think>#### 9")


def test_answers_of_math_are_what_is_marked():
    math = answer_of(["math", "format"])
    assert math(r"<think>3</think>so \boxed{\frac{1}{2}}") == math("<answer>0.5</answer>")
    assert math(r"\boxed{\text{Left}}") == math("it is\n#### left")
    assert math(r"\boxed{2x + 1}") == math(r"thus \boxed{2x+1}.") != math(r"\boxed{3x+1}")
    assert math("so it is 42") == math(r"\boxed{42}")
