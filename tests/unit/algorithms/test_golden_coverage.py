"""Every recorded case is compared, or left out for a stated reason."""

from tests.unit.algorithms import (
    test_golden_advantages as advantages,
    test_golden_kl_and_rewards as kl_and_rewards,
    test_golden_losses as losses,
)
from tests.unit.algorithms.golden import all_cases, cases


def test_no_recorded_case_is_forgotten() -> None:
    compared = [
        *cases("rollout_is_v0"),
        *cases("rollout_corr_v3"),
        *losses.PLAIN,
        *losses.BYPASS,
        *advantages.OFFERED,
        *kl_and_rewards.KL_CASES,
    ]
    left_out = kl_and_rewards.NOT_OFFERED.keys()
    assert len(left_out) == 3
    assert {case["id"] for case in compared} | left_out == {case["id"] for case in all_cases()}
