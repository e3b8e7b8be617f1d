"""Groups that a reward did not score are counted under its name, up to metrics and diagnosis."""

from actors.failures import FailureRecord
from streamrl.diagnosis.causes import failed_groups
from streamrl.errors import RewardError, RolloutError
from streamrl.metrics import reward_metrics
from streamrl.types import Books, BufferStats, DropReason, GeneratorStatus, OverduePolicy


def status(generator_id: str, *errors: RolloutError) -> GeneratorStatus:
    record = FailureRecord()
    for error in errors:
        record.add(3, "", error)
    return GeneratorStatus(
        generator_id=generator_id,
        session="s",
        policy_version=0,
        last_failure=record.last,
        failed_rewards=record.rewards,
    )


def stats(*generators: GeneratorStatus) -> BufferStats:
    books = Books(granted=4, acknowledged=1, dropped={DropReason.FAILED: 3})
    return BufferStats(
        incarnation="",
        policy_version=0,
        groups_per_step=1,
        max_staleness=1,
        overdue=OverduePolicy.WAIT,
        books=books,
        generators=generators,
    )


def test_failures_are_counted_by_reward_over_all_generators():
    away, broken = RewardError("away", "judge"), RewardError("broken", "own")
    found = stats(status("a", away, away, RolloutError("engine")), status("b", away, broken))
    assert reward_metrics(found, ["exact_match", "judge"]) == {
        "reward/exact_match/num_failures": 0,
        "reward/judge/num_failures": 3,
        "reward/own/num_failures": 1,
    }
    sentence = failed_groups(found)
    assert sentence.startswith("3 of 4 groups failed; ")
    assert "; reward judge failed 3 times; reward own failed 1 times" in sentence
