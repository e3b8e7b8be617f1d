"""Groups are divided among ranks: each belongs to one, and the tokens are about equal."""

import hypothesis.strategies as st
from hypothesis import given

from learners.batch.packing import owners_of, share
from streamrl.types import GroupHeader

sizes = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=40)


def headers_of(sizes: list[list[int]]) -> list[GroupHeader]:
    return [
        GroupHeader(
            group_id=str(i),
            prompt_index=i,
            environment="test",
            oldest_version=0,
            newest_version=0,
            lengths=tuple(lengths),
            response_lengths=tuple(lengths),
            rewards=(0.0,) * len(lengths),
        )
        for i, lengths in enumerate(sizes)
    ]


@given(sizes, st.sampled_from([1, 2, 3, 8, 32, 33]))
def test_each_group_is_in_the_share_of_one_rank(sizes, num_ranks):
    headers = headers_of(sizes)
    shares = [share(headers, num_ranks, rank) for rank in range(num_ranks)]
    assert sorted(h.prompt_index for s in shares for h in s) == list(range(len(headers)))
    for mine in shares:
        indices = [header.prompt_index for header in mine]
        assert indices == sorted(indices)


@given(sizes, st.sampled_from([1, 2, 3, 8, 32, 33]))
def test_no_rank_has_more_than_another_by_more_than_one_group(sizes, num_ranks):
    headers = headers_of(sizes)
    loads = [0] * num_ranks
    for header, rank in zip(headers, owners_of(headers, num_ranks), strict=True):
        loads[rank] += sum(header.lengths)
    assert max(loads) - min(loads) <= max(map(sum, sizes))
