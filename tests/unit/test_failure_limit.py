"""A generator gives up when its groups fail one after the other, and not before."""

import pytest

from actors.failures import MAX_FAILURES, MAX_FAILURES_AT_START, FailureLimit, FailureRecord
from streamrl import wire
from streamrl.errors import CorruptMessageError, RolloutError
from streamrl.types import FailedRow, GroupFailure
from streamrl.user_code import attributed_to, load_user_code

CODE = """
def by_key(row):
    return row["label"]

def by_index(row):
    return [][0]
"""


def assert_gives_up_after(num_failures: int, limit: FailureLimit) -> None:
    error = RolloutError("reward r.py:score returned None")
    for _ in range(num_failures - 1):
        limit.on_failure(error)
    sentence = f"^{error}; {num_failures} groups have failed one after the other$"
    with pytest.raises(RolloutError, match=sentence):
        limit.on_failure(error)


def test_without_a_success_it_ends_sooner_than_after_one():
    limit = FailureLimit()
    assert_gives_up_after(MAX_FAILURES_AT_START, limit)
    limit.on_success()
    assert_gives_up_after(MAX_FAILURES, limit)
    assert MAX_FAILURES > MAX_FAILURES_AT_START


def test_a_reward_that_fails_for_most_groups_goes_on():
    limit = FailureLimit()
    for number in range(10_000):
        if number % 10:
            limit.on_failure(RolloutError("no luck"))
        else:
            limit.on_success()


def test_groups_that_are_mostly_malformed_are_no_run():
    limit, error = FailureLimit(), CorruptMessageError("expected 4 numbers, found 9")
    sentence = f"^{error}; 40 of the last 50 groups were refused as malformed$"
    for number in range(MAX_FAILURES - 1):
        if number % 5:
            limit.on_failure(error)
        else:
            limit.on_success()
    with pytest.raises(RolloutError, match=sentence):
        limit.on_failure(error)


@pytest.mark.parametrize("every", [2, 10])
def test_groups_that_are_malformed_now_and_then_cost_no_generator(every):
    limit = FailureLimit()
    for number in range(1000):
        if number % every:
            limit.on_success()
        else:
            limit.on_failure(CorruptMessageError("too long"))


def test_the_users_traceback_is_logged_once_for_each_place_that_raises(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    limit = FailureLimit()
    found = []
    for name in ("by_key", "by_key", "by_index", "by_key"):
        function = load_user_code("data.reward", f"{tmp_path}/mine.py:{name}")
        with pytest.raises(RolloutError) as caught, attributed_to("reward", RolloutError):
            function({})
        found.append(limit.details(caught.value).get("exc_info", (None,))[0])
    assert found == [KeyError, None, IndexError, None]
    assert limit.details(RolloutError("not by the user's code")) == {}


def test_a_failure_that_names_a_file_of_no_encoding_is_reported_all_the_same():
    """With a heartbeat, without which the generator would end."""
    record = FailureRecord()
    record.add(3, "line 1 of \udcff.jsonl", RolloutError("there is no file \udcff"))
    assert record.last == wire.decode(wire.encode(record.last), GroupFailure)
    assert record.last.sentence == "there is no file ?"
    assert record.rows == (FailedRow(row="line 1 of ?.jsonl", num_failures=1),)
