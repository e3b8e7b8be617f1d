"""What the policy read and sampled in one episode, token by token.

Invariant: a segment holds exactly the ids that the engine read and sampled, in order. A completion
whose prompt begins with a segment's tokens and media continues that segment; any other begins a new
one.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct, structs

from streamrl.interfaces import (
    CompletionHandle,
    EnvironmentContext,
    Message,
    Observation,
    Sampler,
    ToolSchema,
)
from streamrl.types import (
    Completion,
    FinishReason,
    Float32Array,
    Int32Array,
    Media,
    RoutedExperts,
    SamplingParams,
    TokenSets,
    TopLogprobs,
    Turn,
)
from streamrl.vision.parts import has_media


class Span(Struct, frozen=True):
    """Consecutive tokens [n], observed (version -1) or sampled, with what is recorded for each."""

    token_ids: Int32Array
    logprobs: Float32Array
    policy_versions: Int32Array
    in_loss: bool = True
    sampling_mask: TokenSets | None = None
    top_logprobs: TopLogprobs | None = None


# Siblings begin with the same prompt.
@lru_cache(maxsize=32)
def _observed(token_ids: tuple[int, ...]) -> Span:
    ids = np.array(token_ids, dtype=np.int32)
    return Span(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))


class Segment(Struct, frozen=True):
    """One context that only grew; it becomes one trajectory."""

    spans: tuple[Span, ...]
    turns: tuple[Turn, ...]
    media: tuple[Media, ...] = ()
    routed_experts: RoutedExperts | None = None
    """The experts of its tokens, from the first time the engine read them."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids.tolist())


class Context(Struct, frozen=True):
    """What the policy reads before a turn, images and videos included, and what it samples then."""

    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    sampled: tuple[int, ...] = ()

    def after(self, observation: Observation, start: EnvironmentContext) -> "Context":
        """The context extended by an observation; the prompt's media belong to the prompt's
        tokens."""
        renderer, messages, tools = start.renderer, observation.messages, observation.tools
        new, media = observation.token_ids, observation.media
        if start.media and not media and new == start.prompt_token_ids:
            media = start.media
        if messages:
            media = (*media, *(renderer.media(messages) if has_media(messages) else ()))
        if observation.is_new_context or not self.sampled:
            shown = renderer.encode_messages(messages, tools) if messages else ()
            return Context((*new, *shown), media)
        known = (*self.sampled, *new)
        reply = renderer.encode_reply(messages, known, tools) if messages else ()
        return Context((*self.token_ids, *known, *reply), (*self.media, *media))


class OpenTurn(Struct, frozen=True):
    """The current turn of an unfinished episode: what the policy reads before it, and what it has
    sampled of it so far (`FinishReason.ABORT` unless complete and waiting for the environment)."""

    context: Context
    environment: bytes | None = None
    """The environment's snapshot before the turn, as msgpack; None in the first turn."""
    tools: tuple[ToolSchema, ...] = ()
    sampled: Completion | None = None


class Rollout(Struct, frozen=True):
    """One episode's tokens in order, before it is scored."""

    segments: tuple[Segment, ...]
    metrics: Mapping[str, float]
    finish_reason: FinishReason
    last_response: tuple[int, ...]
    """The token ids that the policy sampled in its last turn."""
    messages: tuple[Message, ...] = ()
    """The whole conversation."""
    open_turn: OpenTurn | None = None
    """Set if the episode is not over; `finish_reason` then means nothing."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(turn for segment in self.segments for turn in segment.turns)

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(medium for segment in self.segments for medium in segment.media)

    @property
    def num_sampled_tokens(self) -> int:
        sampled = None if self.open_turn is None else self.open_turn.sampled
        num_open = 0 if sampled is None else len(sampled.token_ids)
        return sum(turn.num_completion_tokens for turn in self.turns) + num_open

    @property
    def oldest_version(self) -> int:
        """The oldest version of its sampled tokens."""
        columns = [span.policy_versions for part in self.segments for span in part.spans]
        if self.open_turn is not None and self.open_turn.sampled is not None:
            columns.append(self.open_turn.sampled.policy_versions)
        sampled = (versions[versions >= 0] for versions in columns)
        return min((int(versions.min()) for versions in sampled if versions.size), default=0)


class EpisodeRecord:
    """The record of one running episode; grows by one completion at a time."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self._current = 0
        self._last_response: tuple[int, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(turn for segment in self.segments for turn in segment.turns)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(turn.num_completion_tokens for turn in self.turns)

    def add(
        self,
        prompt_token_ids: tuple[int, ...],
        completion: Completion,
        media: tuple[Media, ...] = (),
    ) -> None:
        """Add a completion, and the tokens and media (the whole context) that the engine read for
        it."""
        known = self._continued(prompt_token_ids, media) if self.segments else None
        segment = Segment((), ()) if known is None else self.segments[known]
        observed = prompt_token_ids[len(segment.token_ids) :]
        turn = Turn(
            num_observation_tokens=len(observed),
            num_completion_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        sampled = Span(
            completion.token_ids,
            completion.logprobs,
            completion.policy_versions,
            sampling_mask=completion.sampling_mask,
            top_logprobs=completion.top_logprobs,
        )
        spans = (*segment.spans, _observed(observed), sampled)
        self._current = len(self.segments) if known is None else known
        self._last_response = tuple(completion.token_ids.tolist())
        num_tokens = len(prompt_token_ids) + len(completion.token_ids)
        experts = RoutedExperts.continued(
            segment.routed_experts, completion.routed_experts, num_tokens
        )
        self._set(Segment(spans, (*segment.turns, turn), media, experts))

    def judge(self, *, reward: float = 0.0, num_tool_calls: int = 0, in_loss: bool = True) -> None:
        """Record the environment's answer to the completion that was added last."""
        segment = self.segments[self._current]
        *earlier, turn = segment.turns
        *spans, sampled = segment.spans
        known = (turn.reward, turn.num_tool_calls, sampled.in_loss)
        if known == (reward, num_tool_calls, in_loss):
            return
        turn = structs.replace(turn, reward=reward, num_tool_calls=num_tool_calls)
        spans = [*spans, structs.replace(sampled, in_loss=in_loss)]
        self._set(structs.replace(segment, spans=tuple(spans), turns=(*earlier, turn)))

    def rollout(
        self,
        finish_reason: FinishReason,
        metrics: Mapping[str, float],
        messages: tuple[Message, ...] = (),
        open_turn: OpenTurn | None = None,
    ) -> Rollout:
        segments, last = self.segments, self._last_response
        return Rollout(segments, metrics, finish_reason, last, messages, open_turn)

    def restore(self, rollout: Rollout) -> None:
        """Continue where this rollout ends."""
        self.segments, self._last_response = rollout.segments, rollout.last_response

    def _continued(self, prompt_token_ids: tuple[int, ...], media: tuple[Media, ...]) -> int | None:
        """The longest segment that is a beginning of these tokens and media."""
        lengths = {
            i: len(ids)
            for i, segment in enumerate(self.segments)
            if prompt_token_ids[: len(ids := segment.token_ids)] == ids
            and media[: len(segment.media)] == segment.media
        }
        return max(lengths, key=lengths.__getitem__, default=None)

    def _set(self, segment: Segment) -> None:
        i = self._current
        self.segments = (*self.segments[:i], segment, *self.segments[i + 1 :])


async def go_on(
    engine: Sampler,
    context: Context,
    sampling: SamplingParams,
    handle: CompletionHandle,
    begun: Completion | None,
    max_model_len: int,
) -> Completion:
    """Finish a completion that was begun, if it is not complete. Waits for the engine."""
    if begun is None:
        return await generate(engine, context.token_ids, sampling, handle, context.media)
    if begun.finish_reason is not FinishReason.ABORT:
        return begun
    known = (*context.token_ids, *begun.token_ids.tolist())
    num_begun = len(begun.token_ids)
    if num_begun >= sampling.max_new_tokens or len(known) >= max_model_len:
        # The limits may have changed since.
        return structs.replace(begun, finish_reason=FinishReason.LENGTH)
    shorter = structs.replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_begun,
        min_new_tokens=max(0, sampling.min_new_tokens - num_begun),
    )
    return joined(begun, await generate(engine, known, shorter, handle, context.media))


def joined(begun: Completion | None, rest: Completion) -> Completion:
    """A completion and its continuation, as one."""
    if begun is None:
        return rest
    parts, lengths = (begun, rest), (len(begun.token_ids), len(rest.token_ids))
    experts = rest.routed_experts
    if experts is not None:
        experts = RoutedExperts.continued(begun.routed_experts, experts, len(experts))
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        finish_reason=rest.finish_reason,
        sampling_mask=TokenSets.joined([part.sampling_mask for part in parts], lengths),
        top_logprobs=TopLogprobs.joined([part.top_logprobs for part in parts], lengths),
        routed_experts=experts,
    )


async def generate(
    engine: Sampler,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    handle: CompletionHandle | None,
    media: Sequence[Media],
) -> Completion:
    """A completion; `media` is passed only if there are any, since an engine need not support it.
    Waits for the engine."""
    if not media:
        return await engine.generate(token_ids, sampling, handle)
    return await engine.generate(token_ids, sampling, handle, media)
