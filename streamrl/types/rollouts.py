"""What is sampled: completions, trajectories, groups of them, and a group's header.

Shapes: T tokens of a trajectory, N tokens of a completion. Log-probabilities are in nats.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.types.experts import RoutedExperts
from streamrl.types.media import Media
from streamrl.types.ranges import Count, Name, PolicyVersion, PromptIndex, SiblingNumber, Text
from streamrl.types.tokens import (
    BoolArray,
    Float32Array,
    Int32Array,
    TokenSets,
    TopLogprobs,
    check_group,
    check_reward,
    check_token_sets,
    check_tokens,
    newest_version,
    oldest_version,
    require_one_length,
)

ALIKE_WITHIN = 1e-6
"""Rewards of a group count as equal within this: sums of equal parts differ by rounding."""


class FinishReason(StrEnum):
    """Why a completion, and with it a trajectory, ended.

    `LENGTH`: it reached `generator.max_new_tokens` or the longest context. `DEADLINE`: it was still
    being sampled at `generator.group_deadline_s`, or a turn of it at
    `generator.episode.turn_deadline_s`. `MAX_TURNS`: it had `generator.episode.max_turns`.
    """

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    MAX_TURNS = "max_turns"
    ABORT = "abort"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it, not the policy or the environment."""
        return self in (FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.MAX_TURNS)


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one completion is sampled; `top_k` 0 and `top_p` 1.0 switch truncation off.

    `keep_sampling_mask`, `num_top_logprobs` and `keep_routed_experts` ask for the records of
    `Completion`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    keep_sampling_mask: bool = False
    num_top_logprobs: int = 0
    keep_routed_experts: bool = False


class Completion(Struct, frozen=True, kw_only=True):
    """One reply of an engine.

    `logprobs` [N] are under the distribution actually sampled from (after temperature, top-k and
    top-p); greedy decoding reports them at temperature 1. `policy_versions` [N] is the version
    whose weights sampled each token. `sampling_mask` [N sets] is what truncation left of the
    vocabulary (an empty set means all of it), and `top_logprobs` [N sets] the likeliest tokens
    among those; None if not asked for. `routed_experts` [P + N] are those of the P prompt tokens
    and of the completion, whose last token no layer has seen.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    policy_versions: Int32Array
    finish_reason: FinishReason
    sampling_mask: TokenSets | None = None
    top_logprobs: TopLogprobs | None = None
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        require_one_length(self, "token_ids", "logprobs", "policy_versions")
        check_token_sets(self)


class Turn(Struct, frozen=True, kw_only=True):
    """Facts of one exchange: tokens observed, tokens sampled, tool calls made, and what the
    environment gave for it."""

    num_observation_tokens: Count
    num_completion_tokens: Count
    finish_reason: FinishReason
    num_tool_calls: Count = 0
    reward: float = 0.0


GREEDY_REWARD = "greedy_reward"
"""The metric of a trajectory that holds the reward of its prompt's greedy completion."""
INVALID_TURNS = "num_invalid_turns"
"""The metric under which an environment counts turns that broke its format."""


class Trajectory(Struct, frozen=True, kw_only=True):
    """The record of one rollout: facts only, never an advantage.

    `response_mask` [T] is true where the policy sampled the token; there `behavior_logprobs` [T]
    (nats) and `policy_versions` [T] hold, elsewhere they are 0 and -1. `loss_mask` [T] is true
    where a token counts for the loss, which only a response token may; None: each of them does.
    `media` are the ids of the group's media that its tokens hold places for, in their order.
    `extracted` is what a reward has read in the response, shortened, for people: "" where it found
    nothing, None where it looks for nothing.
    `sampling_mask` and `top_logprobs` [T sets] are those of the completions, empty elsewhere;
    `routed_experts` [T] those of each token's first pass through the engine.
    `teacher_logprobs` [T] (nats) are those of the teachers by url, times their shares, 0 where the
    mask is off; None if there are none. `teacher_top_logprobs` [T sets] are the likeliest tokens of
    the one by url that scores it, under `algorithm.distillation.top_k`.
    """

    token_ids: Int32Array
    response_mask: BoolArray
    behavior_logprobs: Float32Array
    policy_versions: Int32Array
    reward: float
    finish_reason: FinishReason
    turns: tuple[Turn, ...] = ()
    metrics: dict[str, float] = {}
    loss_mask: BoolArray | None = None
    media: tuple[Name, ...] = ()
    sampling_mask: TokenSets | None = None
    top_logprobs: TopLogprobs | None = None
    extracted: Text | None = None
    routed_experts: RoutedExperts | None = None
    teacher_logprobs: Float32Array | None = None
    teacher_top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        check_tokens(self)
        if not self.num_tokens:
            raise ValueError("token_ids: is empty; a trajectory holds at least its prompt")
        check_reward(self.reward)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    def after(self, prompt: Int32Array) -> "Trajectory":
        """The same trajectory with its prompt replaced by another, without media."""
        first = int(self.response_mask.argmax())
        mask = self.sampling_mask

        def moved(column: NDArray[Any], fill: int) -> NDArray[Any]:
            return np.concatenate([np.full(len(prompt), fill, column.dtype), column[first:]])

        return Trajectory(
            token_ids=np.concatenate([prompt, self.token_ids[first:]]),
            response_mask=moved(self.response_mask, 0),
            behavior_logprobs=moved(self.behavior_logprobs, 0),
            policy_versions=moved(self.policy_versions, -1),
            reward=self.reward,
            finish_reason=self.finish_reason,
            sampling_mask=mask and TokenSets(moved(mask.counts, 0), mask.token_ids),
        )

    @property
    def oldest_version(self) -> int | None:
        """Smallest version that sampled a token; None if none was sampled."""
        return oldest_version(self.policy_versions)

    @property
    def newest_version(self) -> int | None:
        """Largest version that sampled a token; None if none was sampled."""
        return newest_version(self.policy_versions)


class TrajectoryGroup(Struct, frozen=True, kw_only=True):
    """The siblings of one prompt: admitted, buffered, taken, trained and accounted as one.

    A sibling is one trajectory, unless its context was rewritten: then each context is one.
    `episode_indices` says which sibling each trajectory belongs to; () if each is its own. `media`
    has each image and video once, even if several trajectories share it. `discarded_lengths` are
    the numbers of tokens sampled in siblings that were not kept. `answer` is the expected one,
    shortened, for people. `teacher` is the one that the row names; "" if none. `teacher_prompt` are
    the tokens that teachers read before the first response token of each trajectory; None: the same
    as the policy.
    """

    group_id: Name
    prompt_index: PromptIndex
    environment: Text
    trajectories: tuple[Trajectory, ...]
    episode_indices: tuple[Count, ...] = ()
    media: tuple[Media, ...] = ()
    discarded_lengths: tuple[Count, ...] = ()
    answer: Text = ""
    teacher: Text = ""
    teacher_prompt: Int32Array | None = None

    def __post_init__(self) -> None:
        check_group(self, self.trajectories)
        if all(t.oldest_version is None for t in self.trajectories):
            raise ValueError("trajectories: none holds a sampled token")

    @property
    def oldest_version(self) -> int:
        """Smallest policy version over all sampled tokens of the group."""
        return min(v for t in self.trajectories if (v := t.oldest_version) is not None)

    @property
    def newest_version(self) -> int:
        """Largest policy version over all sampled tokens of the group."""
        return max(v for t in self.trajectories if (v := t.newest_version) is not None)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)

    @property
    def sampled_lengths(self) -> tuple[int, ...]:
        """Numbers of tokens that the policy sampled, in each trajectory and in each discarded
        sibling."""
        kept = (t.num_response_tokens for t in self.trajectories)
        return (*kept, *self.discarded_lengths)


class GroupHeader(Struct, frozen=True, kw_only=True, gc=False):
    """What the ledger and the learner's planning need to know about a group, without payload.

    `oldest_version` and `newest_version` are those of its sampled tokens. `lengths` are the numbers
    of tokens in each trajectory, `response_lengths` those that the policy sampled;
    `episode_indices` and `discarded_lengths` are the group's.
    """

    group_id: Name
    prompt_index: PromptIndex
    environment: Text
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    lengths: tuple[Count, ...]
    response_lengths: tuple[Count, ...]
    rewards: tuple[float, ...]
    num_bytes: Count = 0
    episode_indices: tuple[Count, ...] = ()
    discarded_lengths: tuple[Count, ...] = ()

    @classmethod
    def of(cls, group: TrajectoryGroup, num_bytes: int = 0) -> "GroupHeader":
        return cls(
            group_id=group.group_id,
            prompt_index=group.prompt_index,
            environment=group.environment,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            lengths=tuple(t.num_tokens for t in group.trajectories),
            response_lengths=tuple(t.num_response_tokens for t in group.trajectories),
            rewards=tuple(t.reward for t in group.trajectories),
            num_bytes=num_bytes,
            episode_indices=group.episode_indices,
            discarded_lengths=group.discarded_lengths,
        )


class SiblingHeader(Struct, frozen=True, kw_only=True, gc=False):
    """Describes a sibling that is put before its group, finished or not, without payload.

    `number` is its index in the group, `lease_id` the lease under which it was sampled.
    `num_tokens` counts the tokens that the policy sampled, `oldest_version` is the oldest version
    among them; `num_bytes` is the payload's size.
    """

    number: SiblingNumber
    lease_id: Name
    oldest_version: PolicyVersion
    num_tokens: Count
    num_bytes: Count = 0

    def follows(self, known: "SiblingHeader") -> bool:
        """Whether it replaces what is known of the same sibling."""
        is_later = self.lease_id != known.lease_id or self.num_tokens >= known.num_tokens
        return is_later and self != known


def episode_indices(num_segments: Iterable[int]) -> tuple[int, ...]:
    """The `TrajectoryGroup.episode_indices` of siblings with so many segments each."""
    counts = tuple(num_segments)
    if all(count == 1 for count in counts):
        return ()
    return tuple(i for i, count in enumerate(counts) for _ in range(count))
