"""The fuzzers of `tests/fuzz` with a small budget; each is a command for a large one."""

from pathlib import Path

from tests.fuzz import buffer_port


async def test_a_buffer_outlives_hostile_messages(tmp_path: Path):
    counts = await buffer_port.fuzz(tmp_path, 4_000, seed=1, num_drawn=800)
    assert counts.num_messages == 4_000
    # Of what reaches the records and the ledger much is answered with success.
    assert 0.1 < counts.num_refused / counts.num_messages < 0.9
    # All but the leases and takes that wait for groups; some of them have an answer, too.
    assert counts.num_unanswered == 0
    assert counts.num_waiting < 0.9 * counts.num_may_wait
