"""What an algorithm needs beside the policy, daemons compute: a critic, a greedy completion."""

from collections.abc import Callable

import pytest

from tests.system.conftest import Launched

Launch = Callable[..., Launched]


@pytest.mark.long
def test_gae_trains_a_critic_beside_the_policy_and_resumes_it(launch: Launch):
    settings = (
        "--set=algorithm.advantage=gae",
        "--set=algorithm.kl_loss.coef=0.01",
        "--set=algorithm.kl_loss.kind=full",
        "--set=learner.checkpoint.every=3",
    )
    run = launch(*settings, "--set=run.max_steps=4")
    assert run.end() == 0, run.output
    again = launch(*settings, "--set=run.max_steps=6", "--resume")
    assert again.end() == 0, again.output
    lines = again.lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert max(line["critic/vf_loss"] for line in lines[:4]) > 0
    assert max(line["critic/grad_norm"] for line in lines[4:]) > 0
    assert abs(lines[0]["actor/kl_loss"]) < 1e-6
    assert lines[-1]["actor/kl_loss"] > 0
    assert again.books["balanced"]


@pytest.mark.long
def test_remax_samples_a_greedy_completion_per_prompt_and_each_batch_has_two_updates(
    launch: Launch,
):
    settings = (
        "--set=algorithm.advantage=remax",
        "--set=learner.updates_per_batch=2",
        "--set=algorithm.loss_config.clip_ratio_high=0.28",
    )
    run = launch(*settings, "--set=run.max_steps=4")
    assert run.end() == 0, run.output
    assert max(line["advantage/abs_mean"] for line in run.lines) > 0
    assert {line["learner/num_updates"] for line in run.lines} == {2}
    assert max(abs(line["actor/ppo_kl"]) for line in run.lines) > 0
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]
    assert run.books["balanced"]
