"""From a lease to a trajectory group: run the siblings' episodes concurrently, score, record.

Invariant: a group holds only facts about what was sampled, nothing derived from them. If a sibling
fails, the whole group fails (RolloutError); a sibling cut by a limit has not failed.

With `generator.oversample`, siblings that are not kept are still counted with their tokens, so that
the learner can compare trained lengths with sampled ones.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from actors.concurrency import DeadlineError, deadline, first_finished, together
from actors.episode_record import Rollout, Segment
from actors.episodes.episode import EpisodeRun
from actors.gateway.agent import Agent
from actors.prompts.rows import for_teachers
from actors.prompts.tasks import seed_of
from actors.rendering.messages import is_prefill
from actors.rendering.renderer import ChatRenderer, load_media, sees_media
from actors.rewards.forms import shown_gold
from actors.rewards.remote.teachers import RemoteTeachers
from streamrl.config.generator import EpisodeSettings, OversampleSettings
from streamrl.errors import RolloutError
from streamrl.interfaces import (
    Engine,
    Environment,
    EnvironmentContext,
    Episode,
    Prompt,
    PromptSource,
    Reward,
    Score,
)
from streamrl.types import (
    GREEDY_REWARD,
    BoolArray,
    GroupFacts,
    Int32Array,
    Lease,
    PackedGroup,
    RoutedExperts,
    SamplingParams,
    TokenSets,
    TopLogprobs,
    TrajectoryGroup,
    episode_indices,
)
from streamrl.types.media import distinct
from streamrl.types.packed import VersionRuns
from streamrl.user_code import is_finite_number


@dataclass(eq=False)
class GroupProgress:
    """The episodes of a group that is being sampled."""

    num_episodes: int = 0
    """Used until the group has begun; from then on `episodes` counts."""
    episodes: Sequence[EpisodeRun] = ()
    """Empty before the group begins."""
    on_slot_free: Callable[[], None] = lambda: None
    """Called when an episode starts waiting for its environment, or ends."""
    finished: dict[int, Rollout] = field(default_factory=dict)
    """Finished episodes by number. Those known before the group begins are not sampled again."""
    left: Mapping[int, Rollout] = field(default_factory=dict)
    """By number: unfinished episodes that an earlier lease left, to be continued."""
    is_kept: bool = False
    """Whether `standing` will be called to keep siblings in the buffer."""

    def ask(self) -> None:
        """Ask the engine for the tokens of unfinished turns; `standing` has them soon after."""
        for episode in self.episodes:
            episode.ask()

    def standing(self) -> dict[int, Rollout]:
        """By number: the finished episodes, and those that another process could continue."""
        now = {number: episode.standing() for number, episode in enumerate(self.episodes)}
        begun = {number: rollout for number, rollout in now.items() if rollout is not None}
        return {**begun, **self.finished}

    @property
    def num_tokens(self) -> int:
        """Tokens that the longest sibling has sampled so far, as far as the engine reports them; -1
        if it reports none."""
        return max((episode.num_tokens for episode in self.episodes), default=-1)

    @property
    def num_slots(self) -> int:
        """Engine slots that its episodes have or wait for; one per episode before the group
        begins."""
        if not self.episodes:
            return self.num_episodes
        return sum([episode.num_slots for episode in self.episodes])

    @property
    def num_running(self) -> int:
        """Episodes that are not over."""
        if not self.episodes:
            return self.num_episodes
        return sum(not episode.is_over for episode in self.episodes)


class TruncatedGroupError(Exception):
    """Limits cut too many siblings, and `generator.episode.truncated` is `drop`."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        super().__init__(f"limits cut all but a few of {len(rollouts)} siblings")
        self.lengths = [rollout.num_sampled_tokens for rollout in rollouts]


@dataclass(frozen=True)
class GroupRunner:
    """Samples and scores groups; holds everything a group needs besides its lease."""

    engine: Engine
    prompts: PromptSource
    renderer: ChatRenderer
    make_environment: Callable[[], Environment | Agent]
    environment: str
    reward: Reward
    sampling: SamplingParams
    group_size: int
    max_model_len: int
    oversample: OversampleSettings = field(default_factory=OversampleSettings)
    """`generator.oversample`."""
    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    """`generator.episode`."""
    open_group: Callable[[EnvironmentContext], AbstractAsyncContextManager[object]] = lambda _: (
        nullcontext()
    )
    """A context manager around a group, for what its siblings share."""
    with_greedy_reward: bool = False
    """Whether to also score a greedy completion, and record its reward with every sibling."""
    deadline_s: float = 3600.0
    """`generator.group_deadline_s`."""
    teachers: RemoteTeachers | None = None
    """The remote teachers of `algorithm.distillation`; None if nothing is trained."""
    run_seed: int | None = 0
    """`run.seed`; None: the prompts are held out."""
    warnings: set[str] = field(default_factory=set)
    """Warnings that were logged for one episode and need not be repeated for each."""

    async def run(self, lease: Lease, progress: GroupProgress | None = None) -> TrajectoryGroup:
        """Sample and score the group of the lease's prompt; `progress` may be read while it runs.

        Waits for the siblings' completions, environments and the reward, or for the deadline.

        Raises:
            RolloutError: a sibling or the reward failed or canceled itself, or the deadline left
                nothing to score.
            PromptTooLongError: the prompt is too long and `data.truncation` is `drop`.
            TruncatedGroupError: too few siblings are left, and `episode.truncated` is `drop`.
        """
        try:
            return await self._group(lease, GroupProgress() if progress is None else progress)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Passed on, it would end the group's task silently, and the lease would expire.
            raise RolloutError("the environment, a tool or the reward canceled itself") from error

    async def _group(self, lease: Lease, progress: GroupProgress) -> TrajectoryGroup:
        context = await self._context(lease)
        # An error here should come before anything is sampled.
        teacher, teacher_prompt = self._lesson(context.prompt)
        async with self.open_group(context) as shared:
            finished = await self._rollouts(replace(context, shared=shared), progress)
        canceled = [
            max(0, episode.num_tokens)
            for episode, rollout in zip(progress.episodes, finished, strict=True)
            if rollout is None
        ]
        rollouts = [rollout for rollout in finished if rollout is not None]
        group = await self._scored_group(lease, context.prompt, rollouts, canceled)
        if self.teachers is None:
            return group
        if teacher_prompt is not None:
            self._require_prompt_alone(group, context.prompt)
        group = structs.replace(group, teacher=teacher, teacher_prompt=teacher_prompt)
        async with self._in_time("the teachers have not scored the group"):
            return await self.teachers.score(group)

    def _lesson(self, prompt: Prompt) -> tuple[str, Int32Array | None]:
        """The prompt's teacher, named by its row ("": all), and the token ids that teachers read
        instead of the prompt (None: the prompt itself)."""
        if self.teachers is None:
            return "", None
        teacher, template = self.teachers.named_by(prompt.row), self.teachers.template
        if not template:
            return teacher, None
        shown = self.renderer.token_ids_of(for_teachers(template, prompt))
        if not shown:
            raise RolloutError("algorithm.distillation.template: renders nothing for this prompt")
        return teacher, np.array(shown, np.int32)

    async def _context(self, lease: Lease) -> EnvironmentContext:
        """What the siblings start from. Waits for a thread if the prompt has media to read."""
        prompt = self.prompts[lease.prompt_index]
        if not sees_media(prompt):
            return self._start_of(prompt, lease)
        return await asyncio.to_thread(lambda: self._start_of(load_media(prompt), lease))

    def _start_of(self, prompt: Prompt, lease: Lease) -> EnvironmentContext:
        return EnvironmentContext(
            prompt,
            self.renderer.encode(prompt),
            self.renderer,
            seed_of(self.run_seed, lease.prompt_index),
            prompt_messages=self.renderer.messages(prompt),
            media=self.renderer.media_of(prompt) if sees_media(prompt) else (),
        )

    async def _rollouts(
        self, context: EnvironmentContext, progress: GroupProgress
    ) -> Sequence[Rollout | None]:
        """The rollouts of the siblings, and of the greedy completion if there is one; None for
        canceled ones."""
        samplings = [self.sampling] * self.num_episodes
        if self.with_greedy_reward:
            samplings[-1] = structs.replace(self.sampling, temperature=0.0)
        progress.episodes = [
            EpisodeRun(
                self.engine,
                self.make_environment,
                max_model_len=self.max_model_len,
                deadline_s=self.deadline_s,
                settings=self.settings,
                on_slot_free=progress.on_slot_free,
                warnings=self.warnings if progress.is_kept else None,
            )
            for _ in samplings
        ]
        for number, rollout in {**progress.left, **progress.finished}.items():
            if number < len(samplings):
                progress.episodes[number].restore(rollout)
        running = [
            _sibling(progress, replace(context, episode_index=number), sampling)
            for number, sampling in enumerate(samplings)
        ]
        if self.oversample.num_siblings and self.oversample.keep == "first_finished":
            return await first_finished(running, self.group_size)
        return await together(running)

    @property
    def num_episodes(self) -> int:
        """Episodes that are sampled for one prompt."""
        return self.group_size + self.oversample.num_siblings + self.with_greedy_reward

    async def _scored_group(
        self, lease: Lease, prompt: Prompt, rollouts: Sequence[Rollout], canceled: Sequence[int]
    ) -> TrajectoryGroup:
        """Score the siblings and assemble the group, without the greedy rollout; `canceled` are the
        token counts of canceled siblings. Waits for the reward, at most `deadline_s`."""
        num_greedy = int(self.with_greedy_reward)
        greedy = rollouts[len(rollouts) - num_greedy :]
        siblings, cut = self._kept(rollouts[: len(rollouts) - num_greedy])
        difficulty = prompt.row.get("difficulty")
        # For `algorithm.sample_weight`.
        metrics = {"difficulty": float(difficulty)} if is_finite_number(difficulty) else {}
        async with self._in_time("the reward has not scored the group"):
            scores = await self._score(prompt, siblings)
            if greedy:
                (greedy_score,) = await self._score(prompt, greedy)
                metrics = {**metrics, GREEDY_REWARD: greedy_score.reward}
        kept = first_of_each([score.reward for score in scores], self.group_size)
        scored = [
            (siblings[i], replace(scores[i], metrics={**metrics, **scores[i].metrics}))
            for i in kept
        ]
        discarded = [siblings[i].num_sampled_tokens for i in set(range(len(siblings))) - {*kept}]
        try:
            return assembled(
                scored,
                group_id=f"{lease.prompt_index}:{lease.lease_id}",
                prompt_index=lease.prompt_index,
                environment=self.environment,
                discarded_lengths=(*discarded, *canceled, *cut),
                answer=shown_gold(prompt),
            )
        except ValueError as error:
            raise RolloutError(f"what was sampled cannot be recorded: {error}") from error

    def _require_prompt_alone(self, group: TrajectoryGroup, prompt: Prompt) -> None:
        before = {
            tuple(t.token_ids[: t.response_mask.argmax()].tolist())
            for t in group.trajectories
            if t.num_response_tokens
        }
        if before != {self.renderer.encode(prompt)} or group.media:
            raise RolloutError(
                "algorithm.distillation.template: an episode does not begin with the text of the "
                "prompt alone, in whose place teachers would read another one; leave it out"
            )

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        try:
            async with deadline(self.deadline_s):
                yield
        except DeadlineError as error:
            raise RolloutError(
                f"{what} within generator.group_deadline_s, which is {self.deadline_s:g} s"
            ) from error

    def _kept(self, siblings: Sequence[Rollout]) -> tuple[Sequence[Rollout], Sequence[int]]:
        """The siblings that stay in the group, and the token counts of the others."""
        if self.settings.truncated == "keep":
            return siblings, ()
        cut = [r.num_sampled_tokens for r in siblings if r.finish_reason.is_truncated]
        kept = [r for r in siblings if not r.finish_reason.is_truncated]
        if len(kept) < min(2, self.group_size):
            raise TruncatedGroupError(siblings)
        return kept, cut

    async def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        episodes = [self._scored(prompt, rollout) for rollout in rollouts]
        return [Score.of(score) for score in await self.reward.score(episodes)]

    def prefill(self, prompt: Prompt, num_turns: int) -> str:
        """The text that the last of `num_turns` turns already had when the policy continued it."""
        content = prompt.content
        if isinstance(content, str) or num_turns > 1 or not is_prefill(content[-1]):
            return self.renderer.prefill
        return str(content[-1]["content"])

    def _scored(self, prompt: Prompt, rollout: Rollout) -> Episode:
        return Episode(
            prompt=prompt,
            response=self.renderer.decode(rollout.last_response),
            response_token_ids=rollout.last_response,
            prefill=self.prefill(prompt, len(rollout.turns)),
            turn_rewards=tuple(turn.reward for turn in rollout.turns),
            num_response_tokens=rollout.num_sampled_tokens,
            finish_reason=rollout.finish_reason,
            metrics=rollout.metrics,
            messages=rollout.messages,
        )


async def _sibling(
    progress: GroupProgress, start: EnvironmentContext, sampling: SamplingParams
) -> Rollout:
    """Run the episode at this index, unless it is finished, and keep its rollout in `progress`."""
    number, finished = start.episode_index, progress.finished
    if number not in finished:
        finished[number] = await progress.episodes[number].run(start, sampling)
    return finished[number]


def first_of_each(rewards: Sequence[float], count: int) -> list[int]:
    """The indices of `count` rewards, ascending: the first of each value, then the second of each,
    and so on; from a round that does not fit completely, the first ones."""
    seen: Counter[float] = Counter()
    rounds = []
    for place, reward in enumerate(rewards):
        rounds.append((seen[reward], place))
        seen[reward] += 1
    return sorted(place for _, place in sorted(rounds)[:count])


def assembled(siblings: Sequence[tuple[Rollout, Score]], **fields: Any) -> TrajectoryGroup:
    """The group of these siblings; each of their segments is one trajectory. `fields` are the
    group's other fields. Arrays are joined and checked once for the whole group.

    Raises:
        ValueError: an engine or an environment has recorded what no trajectory may hold.
    """
    segments = [segment for rollout, _ in siblings for segment in rollout.segments]
    spans = [span for segment in segments for span in segment.spans]
    lengths = [len(span.token_ids) for span in spans]
    policy_versions = np.concatenate([span.policy_versions for span in spans])
    loss_mask: BoolArray | None = None
    if not all(span.in_loss for span in spans):
        in_loss = [np.full(len(span.token_ids), span.in_loss) for span in spans]
        loss_mask = (policy_versions >= 0) & np.concatenate(in_loss)
    facts = tuple(_facts(*s, segment) for s in siblings for segment in s[0].segments)
    experts = [segment.routed_experts for segment in segments]
    packed = PackedGroup(
        facts=facts,
        token_ids=np.concatenate([span.token_ids for span in spans]),
        behavior_logprobs=np.concatenate([span.logprobs for span in spans]),
        version_runs=VersionRuns.of(policy_versions),
        loss_mask=loss_mask,
        episode_indices=episode_indices(len(rollout.segments) for rollout, _ in siblings),
        media=distinct(medium for rollout, _ in siblings for medium in rollout.media),
        sampling_mask=TokenSets.joined([span.sampling_mask for span in spans], lengths),
        top_logprobs=TopLogprobs.joined([span.top_logprobs for span in spans], lengths),
        routed_experts=RoutedExperts.joined(experts, [fact.num_tokens for fact in facts]),
        **fields,
    )
    return packed.group()


def _facts(rollout: Rollout, score: Score, segment: Segment) -> GroupFacts:
    return GroupFacts(
        num_tokens=sum(len(span.token_ids) for span in segment.spans),
        reward=score.reward,
        finish_reason=rollout.finish_reason,
        turns=segment.turns,
        metrics={**score.metrics, **rollout.metrics},
        media=tuple(medium.id for medium in segment.media),
        extracted=score.extracted,
    )


def unbuffered_lease(purpose: str, prompt_index: int) -> Lease:
    """A lease for a prompt that is sampled for an evaluation or a check, without a buffer."""
    lease_id = f"{purpose}/{prompt_index}"
    return Lease(lease_id=lease_id, prompt_index=prompt_index, min_policy_version=0)
