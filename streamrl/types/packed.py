"""The encoded form of a group, as a buffer stores it: the siblings' arrays end to end, in 6 to 8
bytes a token, and more with a loss mask or records of candidates, experts and teachers.

Token ids, and the numbers in token sets, are narrowed for transport, without loss:

    int32      uint16 where all are below 65,536, three bytes where all are below 2**24
    float32    float16, where every value is one

Versions cross as runs of tokens that have the same one; the response mask is where there is one.

Invariant: every `PackedGroup` is the form of a well-formed `TrajectoryGroup`; `group` makes the
latter without checking the tokens again. `widened(narrowed(array))` is the array, bit for bit.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.types.experts import RoutedExperts
from streamrl.types.media import Media
from streamrl.types.ranges import Count, Name, PromptIndex, Text
from streamrl.types.rollouts import FinishReason, GroupHeader, Trajectory, TrajectoryGroup, Turn
from streamrl.types.tokens import (
    BoolArray,
    Float32Array,
    Int32Array,
    TokenSets,
    TopLogprobs,
    check_group,
    check_reward,
    check_tokens,
    newest_version,
    oldest_version,
)

THREE_BYTES = np.dtype("V3")
"""For integers: the low halves of all of them, then their third bytes, which is fast."""
_BEYOND_HALF = 2**13 - 1
"""The bits of a float32 that no float16 has."""


def pack(group: TrajectoryGroup) -> tuple[Any, ...]:
    """The fields of a `PackedGroup`, unchecked, for `streamrl.wire` to encode."""
    members = group.trajectories
    lengths = [t.num_tokens for t in members]
    return (
        group.group_id,
        group.prompt_index,
        group.environment,
        [_facts(t) for t in members],
        narrowed(np.concatenate([t.token_ids for t in members])),
        np.concatenate([t.behavior_logprobs for t in members]),
        VersionRuns.of(np.concatenate([t.policy_versions for t in members])),
        _end_to_end([t.loss_mask for t in members], (t.response_mask for t in members)),
        group.episode_indices,
        group.discarded_lengths,
        group.media,
        _narrow(TokenSets.joined([t.sampling_mask for t in members], lengths)),
        _narrow(TopLogprobs.joined([t.top_logprobs for t in members], lengths)),
        group.answer,
        RoutedExperts.joined([t.routed_experts for t in members], lengths),
        group.teacher,
        _end_to_end(
            [t.teacher_logprobs for t in members], (np.zeros(n, np.float32) for n in lengths)
        ),
        group.teacher_prompt,
        _narrow(TopLogprobs.joined([t.teacher_top_logprobs for t in members], lengths)),
    )


def _narrow(sets: TokenSets | None) -> tuple[Any, ...] | None:
    """Their columns."""
    if sets is None:
        return None
    return tuple(narrowed(getattr(sets, name)) for name in sets.__struct_fields__)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """[n] int32 or float32 in the fewest bytes that hold every value; unchanged if nothing narrower
    does."""
    # Of an array with a negative integer the highest bit is used.
    used = int(np.bitwise_or.reduce(array.view(np.uint32)))
    if array.dtype == np.float32:
        return array if used & _BEYOND_HALF else _halves(array)
    if used < 2**16:
        return array.astype(np.uint16)
    if used < 2**24:
        third = (array >> 16).astype(np.uint8)
        return np.concatenate([array.astype(np.uint16).view(np.uint8), third]).view(THREE_BYTES)
    return array


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """A narrowed array in its original type, read-only; other arrays unchanged."""
    if array.dtype == THREE_BYTES:
        data, start_of_third = array.view(np.uint8), 2 * len(array)
        wide = data[start_of_third:].astype(np.int32) << 16
        wide |= data[:start_of_third].view(np.uint16)
    elif array.dtype in (np.uint16, np.float16):
        wide = array.astype(np.int32 if array.dtype == np.uint16 else np.float32)
    else:
        return array
    wide.flags.writeable = False
    return wide


def _halves(array: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        halves = array.astype(np.float16)
    # float16 lacks some of float32's small and large numbers.
    is_same = np.array_equal(halves.astype(np.float32).view(np.uint32), array.view(np.uint32))
    return halves if is_same else array


def _facts(t: Trajectory) -> tuple[Any, ...]:
    return len(t.token_ids), t.reward, t.finish_reason, t.turns, t.metrics, t.media, t.extracted


def _end_to_end(columns: Sequence[Any], instead: Iterable[Any]) -> Any:
    """A column of all siblings, with a substitute for siblings without it; None if none has it."""
    if all(column is None for column in columns):
        return None
    pairs = zip(columns, instead, strict=True)
    return np.concatenate([other if column is None else column for column, other in pairs])


class GroupFacts(Struct, frozen=True, array_like=True):
    """The fields of a `Trajectory` besides its tokens."""

    num_tokens: Count
    reward: float
    finish_reason: FinishReason
    turns: tuple[Turn, ...] = ()
    metrics: dict[str, float] = {}
    media: tuple[Name, ...] = ()
    extracted: Text | None = None


class VersionRuns(Struct, frozen=True, array_like=True):
    """Policy versions [N] as R runs of equal ones; `lengths` [R] add up to N."""

    versions: Int32Array
    lengths: Int32Array

    @classmethod
    def of(cls, policy_versions: Int32Array) -> "VersionRuns":
        """`policy_versions` [N]."""
        num_tokens = len(policy_versions)
        is_first = np.ones(num_tokens, np.bool_)
        is_first[1:] = policy_versions[1:] != policy_versions[:-1]
        firsts = np.flatnonzero(is_first)
        lengths = np.diff(firsts, append=num_tokens).astype(np.int32)
        return cls(policy_versions[firsts], lengths)

    def require_tokens(self, num_tokens: int) -> None:
        """
        Raises:
            ValueError: the runs are not those of so many tokens.
        """
        versions, lengths = self.versions, self.lengths
        if len(versions) != len(lengths):
            raise ValueError(f"version_runs: has {len(versions)} versions, {len(lengths)} lengths")
        if np.minimum.reduce(lengths, initial=1) < 1:
            raise ValueError("version_runs: a run has no tokens")
        if (total := int(lengths.sum(dtype=np.int64))) != num_tokens:
            raise ValueError(f"version_runs: are of {total} tokens; there are {num_tokens}")
        if np.minimum.reduce(versions, initial=-1) < -1:
            raise ValueError("policy_versions: must be >= 0 where response_mask is on, else -1")


class PackedGroup(Struct, frozen=True, array_like=True, dict=True):
    """A `TrajectoryGroup` with the arrays [sum of T] of its siblings end to end.

    A buffer checks each group: in this form with one pass over each array, however many siblings
    there are.
    """

    group_id: Name
    prompt_index: PromptIndex
    environment: Text
    facts: tuple[GroupFacts, ...]
    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_runs: VersionRuns
    loss_mask: BoolArray | None = None
    episode_indices: tuple[Count, ...] = ()
    discarded_lengths: tuple[Count, ...] = ()
    media: tuple[Media, ...] = ()
    sampling_mask: TokenSets | None = None
    top_logprobs: TopLogprobs | None = None
    answer: Text = ""
    routed_experts: RoutedExperts | None = None
    teacher: Text = ""
    teacher_logprobs: Float32Array | None = None
    teacher_prompt: Int32Array | None = None
    teacher_top_logprobs: TopLogprobs | None = None

    @cached_property
    def policy_versions(self) -> Int32Array:
        """[N]"""
        return self._of_runs(self.version_runs.versions)

    @cached_property
    def response_mask(self) -> BoolArray:
        """[N]"""
        return self._of_runs(self.version_runs.versions >= 0)

    def _of_runs(self, values: NDArray[Any]) -> NDArray[Any]:
        """[R] -> [N], read-only as the arrays of a message are."""
        column = np.repeat(values, self.version_runs.lengths)
        column.flags.writeable = False
        return column

    def __post_init__(self) -> None:
        check_group(self, self.facts)
        for facts in self.facts:
            if facts.num_tokens < 1:
                raise ValueError("token_ids: is empty; a trajectory holds at least its prompt")
            check_reward(facts.reward)
        lengths = sum(facts.num_tokens for facts in self.facts)
        if lengths != len(self.token_ids):
            raise ValueError(f"token_ids: holds {len(self.token_ids)}; its siblings have {lengths}")
        self.version_runs.require_tokens(len(self.token_ids))
        check_tokens(self)
        if oldest_version(self.version_runs.versions) is None:
            raise ValueError("trajectories: none holds a sampled token")

    def group(self) -> TrajectoryGroup:
        """The group; its arrays are views of this one's."""
        return TrajectoryGroup(
            group_id=self.group_id,
            prompt_index=self.prompt_index,
            environment=self.environment,
            trajectories=tuple(
                self._slice(facts, tokens)
                for facts, tokens in zip(self.facts, self._siblings(), strict=True)
            ),
            episode_indices=self.episode_indices,
            discarded_lengths=self.discarded_lengths,
            media=self.media,
            answer=self.answer,
            teacher=self.teacher,
            teacher_prompt=self.teacher_prompt,
        )

    def header(self, num_bytes: int) -> GroupHeader:
        versions = self.version_runs.versions
        oldest, newest = oldest_version(versions), newest_version(versions)
        assert oldest is not None, "checked when it was made"
        assert newest is not None, "checked when it was made"
        return GroupHeader(
            group_id=self.group_id,
            prompt_index=self.prompt_index,
            environment=self.environment,
            oldest_version=oldest,
            newest_version=newest,
            lengths=tuple(facts.num_tokens for facts in self.facts),
            response_lengths=tuple(
                int(np.count_nonzero(self.response_mask[tokens])) for tokens in self._siblings()
            ),
            rewards=tuple(facts.reward for facts in self.facts),
            num_bytes=num_bytes,
            episode_indices=self.episode_indices,
            discarded_lengths=self.discarded_lengths,
        )

    def _siblings(self) -> Iterator[slice]:
        """Where each sibling's tokens are."""
        lengths = (facts.num_tokens for facts in self.facts)
        ends = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        return itertools.starmap(slice, ends)

    def _slice(self, facts: GroupFacts, tokens: slice) -> Trajectory:
        return _Slice(
            token_ids=self.token_ids[tokens],
            response_mask=self.response_mask[tokens],
            behavior_logprobs=self.behavior_logprobs[tokens],
            policy_versions=self.policy_versions[tokens],
            reward=facts.reward,
            finish_reason=facts.finish_reason,
            turns=facts.turns,
            metrics=facts.metrics,
            loss_mask=_cut(self.loss_mask, tokens),
            media=facts.media,
            sampling_mask=_cut(self.sampling_mask, tokens),
            top_logprobs=_cut(self.top_logprobs, tokens),
            extracted=facts.extracted,
            routed_experts=_cut(self.routed_experts, tokens),
            teacher_logprobs=_cut(self.teacher_logprobs, tokens),
            teacher_top_logprobs=_cut(self.teacher_top_logprobs, tokens),
        )


def _cut(column: Any, tokens: slice) -> Any:
    """The record of these tokens; None if none of them has one."""
    if column is None or isinstance(column, np.ndarray):
        return column if column is None else column[tokens]
    return column.part(tokens)


class _Slice(Trajectory, frozen=True, kw_only=True):
    """A trajectory of a group that was checked as a whole."""

    def __post_init__(self) -> None:
        """Nothing to check: it is well formed because its group is."""
