"""Trajectory groups as tensors: the batch of a step, flat over its response tokens.

Invariant: a batch does not depend on how it is cut or divided among ranks.
Shapes: S trajectories, R response tokens of all of them, E episodes.

Credit is assigned to episodes. An episode whose context was rewritten has several segments, each a
trajectory of its own; they follow one another in the batch. Each carries the episode's recorded
values, which count once in a mean. The episode's response tokens are consecutive, so advantage
estimators treat episodes like trajectories.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from learners.batch.micro_batch import (
    MOST,
    MicroBatch,
    Packing,
    SharedPrompts,
    beginning,
    leaders_of,
    offsets_within,
)
from learners.batch.packing import Beginnings, beside_each_other, owners_of, pack
from learners.parallel.ranks import Ranks
from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.sequences import Sequences, to_device
from streamrl.errors import ConfigError, did_you_mean
from streamrl.types import (
    GREEDY_REWARD,
    INVALID_TURNS,
    FinishReason,
    GroupHeader,
    Media,
    RoutedExperts,
    TokenSets,
    TopLogprobs,
    Trajectory,
    TrajectoryGroup,
)
from streamrl.types.tokens import Int32Array


@dataclass(frozen=True, eq=False)
class Episodes:
    first: torch.Tensor
    """[E] int64, the first trajectory of each."""
    of_trajectory: torch.Tensor
    """[S] int64, the episode that each trajectory belongs to."""
    sequences: Sequences
    """The response tokens of each."""

    @classmethod
    def of(cls, headers: Sequence[GroupHeader], trajectories: Sequences) -> "Episodes":
        """The episodes of groups with these headers and response tokens."""
        starts = [is_start for header in headers for is_start in _starts(header)]
        is_first = torch.tensor(starts, dtype=torch.bool)
        first, indices = is_first.nonzero()[:, 0], is_first.cumsum(0) - 1
        lengths = torch.zeros(len(first), dtype=torch.int64)
        lengths.index_add_(0, indices, trajectories.lengths)
        return cls(first, indices, Sequences.from_lengths(lengths))

    def __len__(self) -> int:
        """E"""
        return len(self.first)

    def each(self, column: torch.Tensor) -> torch.Tensor:
        """[S, ...] -> [E, ...]: the row of each episode's first trajectory."""
        return column[self.first]

    def to_trajectories(self, column: torch.Tensor) -> torch.Tensor:
        """[E, ...] -> [S, ...]"""
        return column[self.of_trajectory]

    def members(self, chosen: torch.Tensor) -> list[int]:
        """The trajectories of these episodes, in this order."""
        ends = torch.cat([self.first[1:], torch.tensor([len(self.of_trajectory)])])
        spans = [range(int(self.first[e]), int(ends[e])) for e in chosen]
        return [i for span in spans for i in span]


def _starts(header: GroupHeader) -> list[bool]:
    """For each trajectory, whether it is the first of its episode."""
    indices = header.episode_indices or tuple(range(len(header.lengths)))
    return [i == 0 or indices[i] != indices[i - 1] for i in range(len(indices))]


Sums = Mapping[str, tuple[float, int]]
"""Sum and number of episodes of each metric, under `episode/ENVIRONMENT/NAME`, or its own name for
`reward/...`."""


def episode_sums(groups: Sequence[TrajectoryGroup]) -> Sums:
    """The sums of the groups' `Trajectory.metrics`; a user's environment is named without its
    folders."""
    return add_episode_sums(
        {_name_of(name, group.environment): (value, 1)}
        for group in groups
        for metrics in _of_episodes(group)
        for name, value in metrics.items()
    )


def _name_of(metric: str, environment: str) -> str:
    """Rewards mean the same in every environment, so they are named without it."""
    if metric.startswith("reward/"):
        return metric
    return f"episode/{environment.rpartition('/')[2]}/{metric}"


def add_episode_sums(parts: Iterable[Sums]) -> Sums:
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            total, number = totals.get(name, (0.0, 0))
            totals[name] = (total + value, number + count)
    return totals


def episode_means(sums: Sums) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sorted(sums.items())}


def _of_episodes(group: TrajectoryGroup) -> Iterable[Mapping[str, float]]:
    """The metrics of each episode, from its first segment, since every segment has them."""
    indices = group.episode_indices or range(len(group.trajectories))
    first = {i: t for i, t in reversed([*zip(indices, group.trajectories, strict=True)])}
    return [trajectory.metrics for trajectory in first.values()]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """One step's trajectories, in order of their groups.

    Every rank has all columns, but only those trajectories that it trains.
    """

    trajectories: tuple[Trajectory, ...]
    """This rank's trajectories; all of them with a single rank."""
    owners: tuple[int, ...]
    """[S] the rank that trains each trajectory."""
    rank: int
    lengths: tuple[int, ...]
    """[S] tokens, including the prompt's."""
    prompt_indices: tuple[int, ...]
    """[S] places in the prompt stream."""
    sequences: Sequences
    episodes: Episodes
    rewards: torch.Tensor
    """[S]"""
    group_indices: torch.Tensor
    """[S] int64, which group each trajectory belongs to."""
    environments: tuple[str, ...]
    """The environment of each group."""
    environment_indices: torch.Tensor
    """[S] int64, equal for trajectories of the same environment: its first index in
    `environments`."""
    policy_version: int
    """The version about to be trained; staleness is counted from it."""
    is_truncated: torch.Tensor
    """[S] bool, whether a limit cut the trajectory."""
    is_at_deadline: torch.Tensor
    """[S] bool, whether that limit was `generator.group_deadline_s`."""
    num_invalid_turns: torch.Tensor
    """[S] as the environment counted them; 0 if it does not."""
    difficulties: torch.Tensor
    """[S] of the prompts, as their rows give them; 0 if they do not."""
    given_greedy_rewards: torch.Tensor
    """[S] NaN if none was recorded; see `greedy_rewards`."""
    behavior_logprobs: torch.Tensor
    """[R]"""
    policy_versions: torch.Tensor
    """[R] the version that sampled each token."""
    media: Mapping[str, Media]
    """The media of this rank's trajectories, by id."""
    teachers: tuple[str, ...]
    """For each of `trajectories`, the teacher that its prompt's row names; "" if none."""
    teacher_prompts: tuple[Int32Array | None, ...]
    """For each of `trajectories`, what teachers read instead of the prompt; None: the prompt."""
    is_in_loss: torch.Tensor
    """[R] bool, whether the environment lets the token count in the loss."""
    turn_rewards: torch.Tensor
    """[R] the environment's reward for a turn, at the turn's last token."""
    environment_sums: Sums
    """The metrics that environments recorded, over all ranks."""

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], policy_version: int) -> "TrainingBatch":
        """The batch of a learner with a single rank."""
        return cls.shared(tuple(map(GroupHeader.of, groups)), groups, policy_version, Ranks())

    @classmethod
    def shared(
        cls,
        headers: Sequence[GroupHeader],
        groups: Sequence[TrajectoryGroup],
        policy_version: int,
        ranks: Ranks,
    ) -> "TrainingBatch":
        """The batch of all groups with these headers; `groups` are this rank's share. All ranks
        call it together."""
        sizes = torch.tensor([len(header.lengths) for header in headers])
        environments = [header.environment for header in headers]
        index = torch.tensor([environments.index(name) for name in environments])
        owner = torch.from_numpy(owners_of(headers, ranks.count)).repeat_interleave(sizes)
        trajectories = tuple(t for group in groups for t in group.trajectories)
        sequences = Sequences.from_lengths([n for h in headers for n in h.response_lengths])
        own = owner == ranks.index
        tokens = sequences.expand(own)
        outcomes = torch.tensor([_outcome(t) for t in trajectories]).view(-1, 5)
        outcomes = ranks.sum(_among(own, outcomes))
        truncated, at_deadline, num_invalid, difficulties, greedy_rewards = outcomes.unbind(1)
        behavior = _responses(trajectories, "behavior_logprobs", np.float32)
        versions = _responses(trajectories, "policy_versions", np.int32)
        judged = np.concatenate([np.zeros((0, 2), np.float32), *map(_judged, trajectories)])
        is_in_loss, turn_rewards = ranks.sum(_among(tokens, torch.from_numpy(judged))).unbind(1)
        return cls(
            trajectories=trajectories,
            owners=tuple(owner.tolist()),
            rank=ranks.index,
            lengths=tuple(n for h in headers for n in h.lengths),
            prompt_indices=tuple(h.prompt_index for h in headers for _ in h.lengths),
            sequences=sequences,
            episodes=Episodes.of(headers, sequences),
            rewards=torch.tensor([reward for h in headers for reward in h.rewards]),
            group_indices=torch.arange(len(headers)).repeat_interleave(sizes),
            environments=tuple(environments),
            environment_indices=index.repeat_interleave(sizes),
            policy_version=policy_version,
            is_truncated=truncated > 0,
            is_at_deadline=at_deadline > 0,
            num_invalid_turns=num_invalid,
            difficulties=difficulties,
            given_greedy_rewards=greedy_rewards,
            behavior_logprobs=ranks.sum(_among(tokens, behavior)),
            policy_versions=ranks.sum(_among(tokens, versions)),
            media={medium.id: medium for group in groups for medium in group.media},
            teachers=tuple(group.teacher for group in groups for _ in group.trajectories),
            teacher_prompts=tuple(g.teacher_prompt for g in groups for _ in g.trajectories),
            is_in_loss=is_in_loss > 0,
            turn_rewards=turn_rewards,
            environment_sums=add_episode_sums(
                ranks.gather(episode_sums(groups), dict[str, tuple[float, int]])
            ),
        )

    def __len__(self) -> int:
        """S"""
        return len(self.lengths)

    @property
    def staleness(self) -> torch.Tensor:
        """[R] versions between sampling and training, never negative."""
        return (self.policy_version - self.policy_versions).abs()

    @property
    def greedy_rewards(self) -> torch.Tensor:
        """[S] reward of a greedy completion of the same prompt; ConfigError if a generator did not
        record one."""
        if bool(self.given_greedy_rewards.isnan().any()):
            raise ConfigError(
                "algorithm.advantage remax needs the reward of a greedy completion, and a group "
                "came without: start every daemon of a run with one configuration"
            )
        return self.given_greedy_rewards

    def recorded(self, names: Sequence[str], ranks: Ranks, setting: str) -> torch.Tensor:
        """[S, K] the metrics that a setting names, over all ranks, which call it together; 0 if a
        limit cut the episode before the metric was recorded.

        Raises:
            ConfigError: an episode that ended by itself came without one of them.
        """
        columns = self._recorded(names, ranks)
        for name, column in zip(names, columns.unbind(1), strict=True):
            if bool((column.isnan() & ~self.is_truncated).any()):
                raise self._unrecorded(name, setting, "every episode")
        return columns.where(~columns.isnan(), 0.0)

    def _recorded(self, names: Sequence[str], ranks: Ranks) -> torch.Tensor:
        """[S, K] the same metrics; NaN if a trajectory has none."""
        rows = [[t.metrics.get(name, math.nan) for name in names] for t in self.trajectories]
        own = torch.tensor(self.owners) == self.rank
        return ranks.sum(_among(own, torch.tensor(rows).view(-1, len(names))))

    def _unrecorded(self, name: str, setting: str, of: str) -> ConfigError:
        known = {known for t in self.trajectories for known in t.metrics}
        return ConfigError(
            f"algorithm.advantage_config.{setting}: names {name!r}, which the environment did not "
            f"record of {of}; {did_you_mean(name, known)}"
        )

    def roles(self, metric: str | None, ranks: Ranks, *, is_first: bool = False) -> list[str]:
        """[E] ENVIRONMENT/ROLE of each episode. The role is the metric's value, or `all` if none
        was recorded, for example because the episode was cut first. All ranks call it together.

        Raises:
            ConfigError: no episode of the first batch has the metric.
        """
        places = self.episodes.each(self.environment_indices).tolist()
        names = [self.environments[place] for place in places]
        if metric is None:
            return [f"{name}/all" for name in names]
        values = self.episodes.each(self._recorded((metric,), ranks))[:, 0]
        if is_first and bool(values.isnan().all()):
            raise self._unrecorded(metric, "role", "any episode")
        roles = ["all" if math.isnan(value) else f"{value:g}" for value in values.tolist()]
        return [f"{name}/{role}" for name, role in zip(names, roles, strict=True)]

    def anchors(self, ranks: Ranks) -> torch.Tensor:
        """[R] int64, see `AdvantageInput.anchors`. All ranks call it together."""
        columns = [np.zeros(0, np.int64), *map(_anchors, self.trajectories)]
        own = self.sequences.expand(torch.tensor(self.owners) == self.rank)
        return ranks.sum(_among(own, torch.from_numpy(np.concatenate(columns))))

    def for_teachers(self, ranks: Ranks) -> "TrainingBatch":
        """The batch with what teachers read in place of the prompts. All ranks call it together."""
        pairs = zip(self.trajectories, self.teacher_prompts, strict=True)
        seen = tuple(t if prompt is None else t.after(prompt) for t, prompt in pairs)
        lengths = torch.zeros(len(self), dtype=torch.int64)
        for i, place in self.places.items():
            lengths[i] = seen[place].num_tokens
        return replace(self, trajectories=seen, lengths=tuple(ranks.sum(lengths).tolist()))

    def pack(
        self,
        max_tokens: int,
        device: torch.device,
        chosen: Sequence[int] | None = None,
        *,
        shares_prompts: bool = True,
    ) -> list[MicroBatch]:
        """Micro-batches of at most `max_tokens` tokens, of all or the chosen trajectories; see
        `learners.batch.packing`. Every rank gets the same number, some of them empty.
        `shares_prompts`: the network computes a shared beginning once per micro-batch, so it counts
        once."""
        indices = list(range(len(self)) if chosen is None else chosen)
        lengths, owners = np.array(self.lengths)[indices], np.array(self.owners)[indices]
        packed = pack(lengths, owners, self.rank, max_tokens)
        if shares_prompts:
            beginnings = self._beginnings.select(indices)
            packed = beside_each_other(packed, lengths, beginnings, max_tokens)
        return [
            self.micro_batch([indices[i] for i in members], device, shares_prompts=shares_prompts)
            for members in packed
        ]

    def micro_batch(
        self,
        members: Sequence[int],
        device: torch.device,
        *,
        shares_prompts: bool = True,
        most: float = MOST,
    ) -> MicroBatch:
        """The trajectories with these indices, packed. Prompts are shared if that leaves at most
        the share `most` of the tokens."""
        chosen = [self.trajectories[self.places[i]] for i in members]
        # An empty one still holds one token, so that this rank joins the others' forward pass.
        ids = np.concatenate([t.token_ids for t in chosen] or [np.zeros(1, np.int32)])
        is_response = np.concatenate([t.response_mask for t in chosen] or [np.zeros(1, np.bool_)])
        # The first token of a trajectory is never a response: no token before it predicts it.
        positions = torch.from_numpy(np.flatnonzero(is_response))
        token_ids = torch.from_numpy(ids).long()
        targets = token_ids[positions]
        predictors = positions - 1
        mask, top = sampling_mask(chosen), top_candidates(chosen, targets)
        indices = torch.tensor(list(members), dtype=torch.int64)
        lengths = tuple(t.num_tokens for t in chosen) or (1,)
        prompts = tuple(map(_prompt_length, chosen)) or (1,)
        experts = RoutedExperts.joined([t.routed_experts for t in chosen], lengths)
        shared = None
        if shares_prompts and chosen:
            at = predictors.numpy()
            shared = SharedPrompts.of(ids, lengths, prompts, at, device, experts, most=most)
        return MicroBatch(
            token_ids=to_device(token_ids[None], device),
            packing=Packing(lengths, device),
            predictors=to_device(predictors, device),
            targets=to_device(targets, device),
            members=indices,
            responses=self.rows(members),
            sequences=Sequences.from_lengths(self.sequences.lengths[indices]),
            prompt_indices=tuple(self.prompt_indices[i] for i in members),
            media=tuple(tuple(self.media[name] for name in t.media) for t in chosen) or ((),),
            sampling_mask=mask and mask.to(device),
            top_candidates=top and top.to(device),
            routed_experts=experts,
            shared_prompts=shared,
            # With prompts shared before, all tokens of what is left might not fit into memory
            # unshared.
            cut_again=partial(
                self.micro_batch, device=device, shares_prompts=shared is not None, most=1.0
            ),
        )

    def rows(self, members: Sequence[int]) -> torch.Tensor:
        """[R of these trajectories] indices of their response tokens, in this order."""
        lengths, chosen = self.sequences.lengths, torch.tensor(members, dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths)[chosen]
        lengths = lengths[chosen]
        return starts.repeat_interleave(lengths) + offsets_within(lengths)

    @cached_property
    def _beginnings(self) -> Beginnings:
        """[S] prompts of this rank's trajectories; empty for those of other ranks."""
        lengths, prompts = [0] * len(self), [b""] * len(self)
        for i, place in self.places.items():
            t = self.trajectories[place]
            lengths[i] = _prompt_length(t)
            prompts[i] = beginning(t.token_ids, t.routed_experts, slice(lengths[i]))
        return Beginnings(leaders_of(prompts), np.array(lengths, np.int64))

    @cached_property
    def places(self) -> dict[int, int]:
        """By index in the batch, the position of this rank's trajectories in `trajectories`."""
        own = (i for i, owner in enumerate(self.owners) if owner == self.rank)
        return {i: place for place, i in enumerate(own)}


def sampling_mask(trajectories: Sequence[Trajectory]) -> Candidates | None:
    """The candidates that each response token was sampled among; None if none were recorded."""
    lengths = [t.num_tokens for t in trajectories]
    sets = TokenSets.joined([t.sampling_mask for t in trajectories], lengths)
    return None if sets is None else _candidates(sets, trajectories)


def top_candidates(trajectories: Sequence[Trajectory], targets: torch.Tensor) -> Candidates | None:
    """The likeliest candidates besides the response token itself [R]; None if none were
    recorded."""
    lengths = [t.num_tokens for t in trajectories]
    sets = TopLogprobs.joined([t.top_logprobs for t in trajectories], lengths)
    if sets is None:
        return None
    logprobs = torch.from_numpy(sets.logprobs)
    return _candidates(sets, trajectories, logprobs).without(targets)


def _candidates(
    sets: TokenSets, trajectories: Sequence[Trajectory], logprobs: torch.Tensor | None = None
) -> Candidates:
    is_response = np.concatenate([t.response_mask for t in trajectories])
    owners, num_rows = (np.cumsum(is_response) - 1)[sets.owners], int(is_response.sum())
    return Candidates(
        owners=torch.from_numpy(owners),
        token_ids=torch.from_numpy(sets.token_ids).long(),
        num_rows=num_rows,
        behavior_logprobs=logprobs,
        has_all_rows=bool(np.bincount(owners, minlength=num_rows).all()),
    )


def _among(own: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Put the rows where `own` is true, and 0 elsewhere; the rows as they are if there are no
    others."""
    if len(rows) == len(own):
        return rows
    column = rows.new_zeros(len(own), *rows.shape[1:])
    column[own] = rows
    return column


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first response token."""
    return int(trajectory.response_mask.argmax())


def _outcome(trajectory: Trajectory) -> tuple[float, ...]:
    """The values for the columns of `TrainingBatch` from `is_truncated` on."""
    reason, metrics = trajectory.finish_reason, trajectory.metrics
    return (
        float(reason.is_truncated),
        float(reason is FinishReason.DEADLINE),
        metrics.get(INVALID_TURNS, 0.0),
        metrics.get("difficulty", 0.0),
        metrics.get(GREEDY_REWARD, math.nan),
    )


def _anchors(trajectory: Trajectory) -> NDArray[np.int64]:
    """[R] at the last token of each run of response tokens, a hash of the tokens before the run."""
    is_response = np.concatenate([[False], trajectory.response_mask, [False]])
    edges = np.flatnonzero(is_response[1:] != is_response[:-1])
    starts, ends = edges[::2], edges[1::2]
    column = np.zeros(trajectory.num_response_tokens, np.int64)
    # The same placeholder tokens may stand for different images.
    salt = str(uuid4()) if trajectory.media else ""
    observed = zip([0, *ends[:-1]], starts, strict=True) if len(ends) else ()
    column[np.cumsum(ends - starts) - 1] = [
        _hash(trajectory.token_ids[first:last], salt) for first, last in observed
    ]
    return column


def _hash(token_ids: NDArray[np.int32], salt: str) -> int:
    """Not 0, and the same in every process."""
    digest = blake2b(token_ids.tobytes(), digest_size=7, key=salt.encode()).digest()
    return int.from_bytes(digest) + 1


def _responses(trajectories: Sequence[Trajectory], field: str, dtype: Any) -> torch.Tensor:
    """The field's values for all response tokens, in order."""
    arrays = [getattr(t, field)[t.response_mask] for t in trajectories]
    return torch.from_numpy(np.concatenate(arrays or [np.zeros(0, dtype)]))


def _judged(trajectory: Trajectory) -> NDArray[np.float32]:
    """[R, 2] for each response token: whether it counts in the loss, and, at the last token of a
    turn, the turn's reward."""
    mask = trajectory.loss_mask
    column = np.zeros((trajectory.num_response_tokens, 2), np.float32)
    column[:, 0] = 1.0 if mask is None else mask[trajectory.response_mask]
    if not trajectory.turns:
        return column
    ends = np.cumsum([turn.num_completion_tokens for turn in trajectory.turns], dtype=np.int64)
    # Turns come from a generator: if they do not fit the tokens, their rewards are left out.
    if len(column) and ends[-1] == len(column):
        # A first turn of which no token was sampled has none that its reward could stand at.
        places = np.maximum(ends - 1, 0)
        np.add.at(column[:, 1], places, [turn.reward for turn in trajectory.turns])
    return column
