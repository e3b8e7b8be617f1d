"""Hypothesis strategies and plain makers of StreamRL's records."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np

from streamrl.interfaces import GeneratorBuffer
from streamrl.samples.record import Message, Sample
from streamrl.types import (
    FinishReason,
    GeneratorStatus,
    GroupHeader,
    Lease,
    RoutedExperts,
    SiblingHeader,
    TokenSets,
    TopLogprobs,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


async def lease_one(
    buffer: GeneratorBuffer, lease_id: str, generator_id: str, wait_s: float
) -> Lease | None:
    """A call for one lease."""
    leases = await buffer.lease([lease_id], generator_id, wait_s)
    assert len(leases) <= 1
    return leases[0] if leases else None


async def fill(buffer: GeneratorBuffer, *lease_ids: str, **group: Any) -> None:
    """Lease and put groups; `group` is as of `make_group`."""
    for lease_id in lease_ids:
        lease = await lease_one(buffer, lease_id, "g", 0.0)
        assert lease is not None
        await buffer.put(lease_id, make_group(lease.prompt_index, lease_id=lease_id, **group))


def make_sample(step: int = 1, reward: float = 0.0, text: str = "reply", **facts: object) -> Sample:
    return Sample(
        **{
            "step": step,
            "prompt_index": 3,
            "sibling": 0,
            "environment": "single_turn",
            "prompt": "question",
            "messages": (Message("assistant", text),),
            "reward": reward,
            "finish_reason": "stop",
            "num_response_tokens": 2,
            "version": 0,
            "newest_version": 0,
            **facts,
        }
    )


def make_trajectory(
    num_prompt: int = 3,
    num_response: int = 4,
    *,
    version: int = 0,
    ahead: int = 0,
    reward: float = 1.0,
    logprob: float = -0.5,
    finish_reason: FinishReason = FinishReason.STOP,
    seed: int = 0,
) -> Trajectory:
    """The version of its last token is so many `ahead` of that of the others."""
    rng = np.random.default_rng(seed)
    mask = np.arange(num_prompt + num_response) >= num_prompt
    versions = np.where(mask, version, -1).astype(np.int32)
    versions[-1] += ahead
    return Trajectory(
        token_ids=rng.integers(2, 40, len(mask)).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, logprob, 0).astype(np.float32),
        policy_versions=versions,
        reward=reward,
        finish_reason=finish_reason,
        turns=(
            Turn(
                num_observation_tokens=num_prompt,
                num_completion_tokens=num_response,
                finish_reason=finish_reason,
            ),
        ),
    )


def make_group(
    prompt_index: int, *, lease_id: str = "", size: int = 2, **kwargs: int
) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=f"{prompt_index}:{lease_id}",
        prompt_index=prompt_index,
        environment="test",
        trajectories=tuple(make_trajectory(seed=i, **kwargs) for i in range(size)),
    )


def make_header(lease: Lease, version: int = 0, **changes: Any) -> GroupHeader:
    """Of a group for the lease."""
    fields = {
        "group_id": f"group of {lease.lease_id}",
        "prompt_index": lease.prompt_index,
        "environment": "test",
        "oldest_version": version,
        "newest_version": version,
        "lengths": (3,),
        "response_lengths": (2, 2),
        "rewards": (1.0,),
    }
    return GroupHeader(**{**fields, **changes})


def make_status(generator_id: str = "g", session: str = "", **fields: Any) -> GeneratorStatus:
    """The session has the generator's name if it has none of its own."""
    known = {"session": session or generator_id, "policy_version": 0, **fields}
    return GeneratorStatus(generator_id=generator_id, **known)


def make_sibling(lease_id: str, number: int = 0, **fields: Any) -> SiblingHeader:
    known = {"oldest_version": 0, "num_tokens": 1, **fields}
    return SiblingHeader(number=number, lease_id=lease_id, **known)


def with_candidates(group: TrajectoryGroup, mask_size: int, num_top: int) -> TrajectoryGroup:
    """The group with sampling masks of up to so many ids, and so many candidates of each token.

    What no engine gives: the ids are random, and some tokens have no mask.
    """
    members = []
    for t in group.trajectories:
        rng = np.random.default_rng(int(t.token_ids.sum()))
        kept, ids, logprobs = [], [], []
        for token, is_response in zip(t.token_ids, t.response_mask, strict=True):
            drawn = rng.permutation(np.setdiff1d(np.arange(2, 40), [token])).astype(np.int32)
            size = int(rng.integers(0, mask_size)) if is_response else 0
            kept.append(np.append(drawn[:size], token).astype(np.int32) if size else drawn[:0])
            ids.append(drawn[: num_top if is_response else 0])
            logprobs.append(-2.0 - rng.random(len(ids[-1]), dtype=np.float32))
        mask, top = TokenSets.of(kept), TopLogprobs.of(ids, logprobs)
        members.append(msgspec.structs.replace(t, sampling_mask=mask, top_logprobs=top))
    return msgspec.structs.replace(group, trajectories=tuple(members))


NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 4, 2
"""Of the mixtures of experts in `tests.model_families`."""


def with_experts(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with random experts of every token but the last, the same for equal beginnings."""
    members = tuple(
        msgspec.structs.replace(t, routed_experts=random_experts(t)) for t in group.trajectories
    )
    return msgspec.structs.replace(group, trajectories=members)


def random_experts(trajectory: Trajectory) -> RoutedExperts:
    ids = trajectory.token_ids[:-1]
    drawn = [np.random.default_rng(ids[: i + 1]) for i in range(len(ids))]
    scores = [rng.random((NUM_LAYERS, NUM_EXPERTS)) for rng in drawn]
    order = np.array(scores).reshape(-1, NUM_LAYERS, NUM_EXPERTS).argsort(-1)
    return RoutedExperts.of(order[..., :TOP_K], trajectory.num_tokens)


def damaged(group: TrajectoryGroup, **changes: object) -> TrajectoryGroup:
    """The group itself, after somebody wrote into its first trajectory past every check."""
    for name, value in changes.items():
        msgspec.structs.force_setattr(group.trajectories[0], name, value)
    return group


names = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=20)
"""Ids as records have them."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 30))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    mask[-1] = True
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Trajectory(
        token_ids=rng.integers(0, 2**31 - 1, length).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(3.0, length), 0).astype(np.float32),
        policy_versions=np.where(mask, rng.integers(0, 100, length), -1).astype(np.int32),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2)),
        extracted=draw(st.none() | st.text(max_size=5)),
    )


@st.composite
def _groups(draw: st.DrawFn) -> TrajectoryGroup:
    """Some have loss masks, in all of their trajectories or in none, as a packed group has."""
    members = tuple(draw(st.lists(trajectories(), min_size=1, max_size=4)))
    if draw(st.booleans()):
        members = tuple(
            msgspec.structs.replace(t, loss_mask=t.response_mask & (t.token_ids % 2 == 0))
            for t in members
        )
    sizes = draw(st.lists(st.integers(1, 2), min_size=len(members), max_size=len(members)))
    indices = [i for i, size in enumerate(sizes) for _ in range(size)][: len(members)]
    return TrajectoryGroup(
        group_id=draw(names),
        prompt_index=draw(st.integers(0, 2**40)),
        environment=draw(st.text(max_size=10)),
        trajectories=members,
        episode_indices=tuple(indices) if draw(st.booleans()) else (),
        answer=draw(st.text(max_size=5)),
    )


groups = _groups()
