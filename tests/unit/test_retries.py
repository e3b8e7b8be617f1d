"""Leases of one prompt that end without a group: what is counted, what is forgotten."""

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from streamrl.metrics import buffer_metrics
from streamrl.types import (
    MAX_RETRIED,
    DropReason,
    RetriedPrompt,
    replace,
)
from tests.records import make_header, make_status

TTL_S = 10.0


def make_state(**settings: int) -> BufferState[bytes]:
    state = BufferState[bytes](
        Ledger(**{"groups_per_step": 2, "max_staleness": 1, **settings}), lease_ttl_s=TTL_S
    )
    state.attach(0, None)
    return state


def release(state: BufferState[bytes], *prompt_indices: int) -> None:
    """Lease the first free prompts, which are these, and release them."""
    lease_ids = [f"a/{prompt_index}" for prompt_index in prompt_indices]
    leases = [lease for lease_id in lease_ids for lease in state.lease([lease_id], "g", 0.0)]
    assert [lease.prompt_index for lease in leases] == list(prompt_indices)
    for lease_id in lease_ids:
        state.ledger.release(lease_id, DropReason.RELEASED)


def put(state: BufferState[bytes], *prompt_indices: int) -> None:
    for prompt_index in prompt_indices:
        (lease,) = state.lease([f"p/{prompt_index}"], "g", 0.0)
        assert lease.prompt_index == prompt_index
        state.put(lease.lease_id, make_header(lease), b"", 0.0)


def retried(state: BufferState[bytes]) -> dict[int, int]:
    return {prompt.prompt_index: prompt.num_leases for prompt in state.stats(0.0).retried}


def test_leases_that_expire_or_end_with_their_process_are_counted():
    state = make_state()
    state.lease(["s1/0"], "g", 0.0)
    state.expire(TTL_S)
    state.heartbeat(make_status(session="s2"), TTL_S)
    state.lease(["s2/0"], "g", TTL_S)
    state.heartbeat(make_status(session="s3"), TTL_S)
    state.lease(["s3/0"], "g", TTL_S)
    state.heartbeat(make_status(session="s3", is_leaving=True), TTL_S)
    assert state.stats(TTL_S).retried == (RetriedPrompt(prompt_index=0, num_leases=3),)


def test_the_most_frequent_ones_are_shown_and_the_metric_is_the_largest():
    state = make_state(max_staleness=4)
    assert buffer_metrics(state.stats(0.0))["buffer/max_leases_per_prompt"] == 0
    for _ in range(3):
        release(state, 0, 1, 2, 3, 4, 5)
    release(state, 0, 1)
    stats = state.stats(0.0)
    assert [prompt.prompt_index for prompt in stats.retried] == [1, 0, 5, 4]
    assert len(stats.retried) == MAX_RETRIED
    assert buffer_metrics(stats)["buffer/max_leases_per_prompt"] == 4


def test_what_the_books_of_a_learner_end_is_forgotten_and_what_they_free_is_not_counted():
    state = make_state()
    for _ in range(3):
        release(state, 0, 1)
    books = state.ledger.books()
    state.attach(0, replace(books, open_ranges=((1, 2),)))
    assert retried(state) == {1: 3}
    put(state, 1)
    for _ in range(4):
        state.attach(0, replace(books, open_ranges=((1, 2),)))
    assert retried(state) == {}
