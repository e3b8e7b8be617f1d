"""A run that does not learn is told so, by one sentence with a remedy; one that learns is not."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from streamrl.config.run import SignSettings
from streamrl.diagnosis.learning import Signs
from streamrl.tracking.jsonl import JsonlTracker, read_lines

STEPS = 4
GOOD: Mapping[str, Any] = {
    "reward/mean": 0.4,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/groups_alike_frac": 0.3,
    "reward/format": 0.6,
    "advantage/abs_mean": 0.4,
    "actor/entropy": 0.5,
    "actor/kl_loss": 0.01,
    "learner/grad_norm": 0.9,
    "mismatch/rollout_is_eff_sample_size": 0.95,
    "response_length/clip_ratio": 0.1,
    "episode/tools/num_tool_calls": 1.5,
    "learner/num_passes": 2.0,
}
ALIKE = {"reward/groups_alike_frac": 1.0, "advantage/abs_mean": 0.0, "learner/grad_norm": 0.0}


def seen(*parts: Mapping[str, Any], **settings: Any) -> list[Mapping[str, str]]:
    """After each step of a run with STEPS steps of each part."""
    signs = Signs(SignSettings(steps=STEPS, **settings))
    lines = [{**GOOD, **part} for part in parts for _ in range(STEPS)]
    return [signs.add(step, line) for step, line in enumerate(lines, 1)]


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        (
            "no_reward",
            {**ALIKE, "reward/mean": 0.0, "reward/max": 0.0},
            "for 4 steps every reward is 0: compare answers",
        ),
        (
            "one_reward",
            {**ALIKE, "reward/mean": 1.0, "reward/min": 1.0},
            "for 4 steps every reward is 1: if the prompts are solved",
        ),
        ("alike", ALIKE, "the rewards of each group are alike, so no advantage is left: raise"),
        (
            "no_gradient",
            {"learner/grad_norm": 0.0, "actor/entropy": 0.0},
            "the gradient is 0: see which",
        ),
        ("bad_gradient", {"learner/grad_norm": -1.0}, "the gradient is not finite: lower"),
        ("bad_gradient", {"learner/grad_norm": math.nan}, "the gradient is not finite: lower"),
        (
            "falling",
            {"reward/mean": 0.1},
            "the training reward is 0.100, and was 0.400 at step 4: lower",
        ),
        (
            "collapsed",
            {"actor/entropy": 0.01},
            "the entropy is 0.01 nats, and was 0.5 at the start: raise",
        ),
        (
            "few_count",
            {"mismatch/rollout_is_eff_sample_size": 0.1},
            "the effective sample size is 0.10 of the batch: lower",
        ),
        ("cut", {"response_length/clip_ratio": 0.75}, "a limit cuts 75 % of the responses: raise"),
        ("far", {"actor/kl_loss": 3.0}, "the KL to the reference is 3 nats a token: raise"),
        ("far", {"actor/kl_loss": None, "reward/kl": 3.0}, "is 3 nats a token: raise"),
        ("no_form", {"reward/format": 0.0}, "no response has the form that format pays for: show"),
        ("no_tool", {"episode/tools/num_tool_calls": 0.0}, "no tool is called: say in"),
    ],
)
def test_a_sign_is_said_alone_once_it_holds_over_the_steps(
    name: str, line: Mapping[str, Any], sentence: str
) -> None:
    found = seen({"reward/mean": 0.0} if name == "no_reward" else {}, line)
    if name == "falling":
        # Less than half of the best, as a mean of these steps, comes before the last of them.
        assert all(not one.keys() - {name} for one in found)
    else:
        assert [set(one) for one in found[: STEPS + 1]] == [set()] * (STEPS + 1)
    assert set(found[-1]) == {name}
    assert sentence in found[-1][name]


def test_a_reward_that_fell_to_nothing_is_said_to_have_fallen():
    assert set(seen({}, {**ALIKE, "reward/mean": 0.0, "reward/max": 0.0})[-1]) == {"falling"}


def test_few_rewards_by_chance_are_no_fall():
    signs = Signs(SignSettings(steps=10))
    rewards = [0.0, 0.03, *[0.0] * 7, 0.03, *[0.0] * 9, 0.02]
    lines = [{**GOOD, "reward/mean": reward} for reward in rewards]
    assert [signs.add(step, line) for step, line in enumerate(lines, 1)] == [{}] * len(lines)


def validated(*rewards: float, num_passes: float = 2.0, num_prompts: float = 400.0) -> set[str]:
    return set(said_of(*rewards, num_passes=num_passes, num_prompts=num_prompts))


def said_of(*rewards: float, num_passes: float, num_prompts: float = 400.0) -> Mapping[str, str]:
    """The signs of a run with a validation every STEPS steps, from before the first one on."""
    signs, found = Signs(SignSettings(steps=STEPS)), {}
    for step in range(1, STEPS * len(rewards) + 1):
        line = {**GOOD, "learner/num_passes": num_passes}
        if step % STEPS == 1:
            version = step - 1
            held_out = {"validation/mean@1": rewards[version // STEPS], "validation/a/mean@1": 0.0}
            line |= {**held_out, "validation/policy_version": float(version)}
            line |= {"validation/num_prompts": num_prompts}
        found = signs.add(step, line)
    return found


def test_a_held_out_reward_that_falls_is_said_by_two_validations():
    assert validated(0.2, 0.6, 0.5, 0.5) == set()
    assert validated(0.2, 0.6, 0.3) == set(), "one may be chance"
    assert validated(0.2, 0.6, 0.3, 0.5) == set()
    assert validated(0.2, 0.6, 0.3, 0.4) == {"held_out_falling"}
    assert validated(0.2, 0.6, 0.1, 0.1, num_passes=32.0) == {"held_out_falling"}
    assert validated(0.0, 0.0, 0.0) == set()
    assert validated(0.2, 0.7, 0.5, 0.5, num_prompts=10.0) == set(), "two prompts may be chance"
    assert validated(0.2, 0.7, 0.2, 0.3, num_prompts=10.0) == {"held_out_falling"}


def test_prompts_that_are_repeated_are_said_to_be_memorized_unless_held_out_ones_gain():
    (sentence,) = seen({"learner/num_passes": 32.0})[-1].values()
    assert sentence.startswith("for 4 steps the same prompts are trained over and over, 32 times")
    assert "no held-out reward (data.eval_source) shows" in sentence
    assert "take more prompts or fewer steps" in sentence
    assert not any(seen({"learner/num_passes": 15.0}))
    assert not any(seen({"learner/num_passes": math.nan}))
    assert not any(seen({"learner/num_passes": 32.0}, max_passes=100.0))
    (sentence,) = said_of(0.2, 0.2, num_passes=32.0).values()
    assert "32 times by now, and the held-out reward has not risen: take more" in sentence
    assert validated(0.2, 0.5, num_passes=32.0) == set()


def test_a_run_that_learns_has_none():
    assert not any(seen({}, {"reward/mean": 0.6}, {"reward/mean": 0.3}))


def test_a_policy_that_has_solved_its_prompts_may_be_sure():
    assert not any(seen({}, {"reward/mean": 0.95, "actor/entropy": 0.001}))


def test_what_is_not_measured_is_no_sign():
    assert not any(seen({name: None for name in GOOD}))
    unbounded = {name: math.nan for name in GOOD if name != "learner/grad_norm"}
    assert not any(seen(unbounded))
    assert not any(seen({}, unbounded))
    signs = Signs(SignSettings(steps=1))
    assert signs.add(1, {}) == {}


def test_a_sign_says_for_how_many_steps_it_has_been_so():
    signs = Signs(SignSettings(steps=10))
    lines = [*[{**GOOD, **ALIKE, "reward/max": 0.0}] * 60, GOOD, *[{**GOOD, **ALIKE}] * 11]
    found = [signs.add(step, line) for step, line in enumerate(lines, 1)]
    assert found[9]["no_reward"].startswith("for 10 steps every reward is 0")
    assert found[59]["no_reward"].startswith("for 60 steps every reward is 0")
    assert found[60] == {}
    assert found[-1]["alike"].startswith("for 11 steps the rewards of each group are alike")


def test_signs_go_on_after_a_resume_as_in_one_run(tmp_path):
    """With what was best and first before, and a gradient that was not finite in the file."""
    bad = {"learner/grad_norm": math.nan}
    held_out = {"validation/mean@1": 0.2, "validation/num_prompts": 400.0}
    falls = {"reward/mean": 0.1, "actor/entropy": 0.001, "learner/num_passes": 32.0}
    lines = [{**GOOD, **part} for part in (held_out, *[{}] * 4, *[{**falls, **bad}] * 6)]
    whole, resumed = (Signs(SignSettings(steps=STEPS)) for _ in range(2))
    found = [whole.add(step, line) for step, line in enumerate(lines, 1)]
    file = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file, first_step=1)
    for step, line in enumerate(lines[:-1], 1):
        tracker.log(line, step)
    tracker.close()
    resumed.go_on(read_lines(file))
    assert set(found[-1]) == {"falling", "memorized", "bad_gradient", "collapsed"}
    assert found[-1]["bad_gradient"].startswith("for 6 steps the gradient is not finite")
    assert resumed.add(len(lines), lines[-1]) == found[-1]


def test_one_step_that_is_good_ends_a_sign():
    signs = Signs(SignSettings(steps=2))
    bad = {**GOOD, "learner/grad_norm": 0.0}
    assert [set(signs.add(i, one)) for i, one in enumerate((bad, bad, GOOD, bad))] == [
        set(),
        {"no_gradient"},
        set(),
        set(),
    ]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_reward_fall": 0.9}, {"reward/mean": 0.1}),
        ({"min_entropy_frac": 0.01}, {"actor/entropy": 0.01}),
        ({"min_eff_sample_size": 0.05}, {"mismatch/rollout_is_eff_sample_size": 0.1}),
        ({"max_clip_ratio": 0.8}, {"response_length/clip_ratio": 0.75}),
        ({"max_kl": 5.0}, {"actor/kl_loss": 3.0}),
    ],
)
def test_a_threshold_is_a_setting(settings: Mapping[str, float], line: Mapping[str, Any]) -> None:
    assert any(seen({}, line))
    assert not any(seen({}, line, **settings))


def test_none_is_looked_for_with_no_steps():
    signs = Signs(SignSettings(steps=0))
    assert not any(signs.add(step, {"learner/grad_norm": 0.0}) for step in range(50))
