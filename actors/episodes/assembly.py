"""The record of a group, from the rollouts of its siblings.

Invariant: each segment is one trajectory, its tokens in the order in which they were read and
sampled. Arrays are joined and checked once for the whole group, as the buffer does.
Called by: rollout.py, once the group is scored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from actors.episodes.record import Rollout, Segment, Span
from streamrl.types import (
    BoolArray,
    Facts,
    PackedGroup,
    TokenSets,
    TopLogprobs,
    TrajectoryGroup,
    episode_indices,
)
from streamrl.types.media import distinct


class ScoredRollout(NamedTuple):
    """`metrics` stand beside the rollout's own."""

    rollout: Rollout
    reward: float
    metrics: Mapping[str, float]

    def facts(self, segment: Segment) -> Facts:
        rollout = self.rollout
        return Facts(
            num_tokens=sum(len(span.token_ids) for span in segment.spans),
            reward=self.reward,
            finish_reason=rollout.finish_reason,
            turns=segment.turns,
            metrics={**self.metrics, **rollout.metrics},
            media=tuple(medium.id for medium in segment.media),
        )


def assembled(siblings: Sequence[ScoredRollout], **fields: Any) -> TrajectoryGroup:
    """The group of these siblings; `fields` are its further ones.

    Raises:
        ValueError: an engine or an environment has recorded what no trajectory may hold.
    """
    spans = [span for s in siblings for part in s.rollout.segments for span in part.spans]
    lengths = [len(span.token_ids) for span in spans]
    policy_versions = np.concatenate([span.policy_versions for span in spans])
    response_mask = policy_versions >= 0
    packed = PackedGroup(
        facts=tuple(s.facts(segment) for s in siblings for segment in s.rollout.segments),
        token_ids=np.concatenate([span.token_ids for span in spans]),
        response_mask=response_mask,
        behavior_logprobs=np.concatenate([span.logprobs for span in spans]),
        policy_versions=policy_versions,
        loss_mask=_loss_mask(spans, response_mask),
        episode_indices=episode_indices(len(s.rollout.segments) for s in siblings),
        media=distinct(medium for s in siblings for medium in s.rollout.media),
        sampling_mask=TokenSets.joined([span.sampling_mask for span in spans], lengths),
        top_logprobs=TopLogprobs.joined([span.top_logprobs for span in spans], lengths),
        **fields,
    )
    return packed.group()


def _loss_mask(spans: Sequence[Span], response_mask: BoolArray) -> BoolArray | None:
    if all(span.in_loss for span in spans):
        return None
    in_loss = [np.full(len(span.token_ids), span.in_loss) for span in spans]
    mask: BoolArray = response_mask & np.concatenate(in_loss)
    return mask
