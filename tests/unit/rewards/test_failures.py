"""Groups that a reward did not score are counted under its name, up to metrics and diagnosis."""

from msgspec.structs import replace

from actors.failures import FailureLimit, FailureRecord
from streamrl.diagnosis.causes import NOTHING_SCORED, failed_groups
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
        staleness_bound=1,
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
    assert sentence.startswith("3 of 4 groups up to version 0 failed; ")
    assert "; reward judge failed 3 times; reward own failed 1 times" in sentence


def test_a_reward_that_scores_none_of_the_first_groups_is_said_with_the_first_of_them():
    error = RewardError("reward r.py:score: KeyError: 'label' (r.py:4)", "score")
    books = Books(granted=2, leased=1, dropped={DropReason.FAILED: 1})
    first = replace(stats(status("a", error)), books=books)
    sentence = failed_groups(first)
    assert "KeyError: 'label' (r.py:4)" in sentence
    assert sentence.endswith(f"; {NOTHING_SCORED}")
    assert "streamrl check CONFIG --deep" in NOTHING_SCORED
    engine = replace(first, generators=(status("a", RolloutError("engine")),))
    scored = replace(first, books=replace(books, leased=0, buffered=1))
    assert not [s for s in (engine, scored) if NOTHING_SCORED in failed_groups(s)]
    limit = FailureLimit()
    assert [NOTHING_SCORED in limit.first_remedy(error) for _ in range(2)] == [True, False]
    assert NOTHING_SCORED in limit.remedy(error)
    limit.on_success()
    assert not limit.remedy(error)
