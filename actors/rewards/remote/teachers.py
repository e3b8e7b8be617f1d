"""Teachers behind a URL: the log-probability of each sampled token under an engine's model.

    vLLM     POST /v1/completions with `prompt_logprobs`: of each token of the prompt, by its id
    SGLang   POST /generate with `return_logprob` and `logprob_start_len`: (log-probability, id)

and, with `algorithm.distillation.top_k`, those of the likeliest tokens at each place. A trajectory
is sent as the prompt of a request that asks for as few new tokens as the engine allows. Both
engines answer at temperature 1 and over the whole vocabulary.

Invariant: recorded log-probabilities belong to the very tokens that were sampled: an answer with
other ids, of another length, or without a finite number is refused. A request that fails, is late
or gets such an answer is made again; after the last retry the group fails with the reason, as if a
reward had not scored it.

Before the first request an engine decodes a sample of the policy's token ids. If the text is
another one, its model has another tokenizer, and the generator ends.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from actors.concurrency import together
from actors.engines.served.http import MAX_ANSWER_BYTES
from actors.rendering.renderer import ChatRenderer
from actors.rewards.calls.limits import FinalError, RewardLimits
from actors.rewards.remote.http import Service, ServiceSettings
from streamrl.config.algorithm.distillation import DistillationSettings, TeacherSettings
from streamrl.errors import ConfigError, RolloutError, did_you_mean, prefixed
from streamrl.types import TopLogprobs, Trajectory, TrajectoryGroup
from streamrl.types.ranges import TokenId

log = logging.getLogger(__name__)

SETTING = "algorithm.distillation.teachers"
# The first is what vLLM sends for minus infinity, which JSON lacks.
_MINUS_INFINITY, _ABOVE_ROUNDING = -9999.0, 0.1
# Upper bound of a log-probability's JSON: vLLM also sends the text of each token.
_LOGPROB_BYTES = 256
NUM_COMPARED = 512
"""Token ids of the policy that an engine decodes, spread evenly over the vocabulary."""


class VllmLogprob(Struct, frozen=True):
    logprob: float


class VllmChoice(Struct, frozen=True):
    """`prompt_logprobs` [N]: for each token log-probabilities by id; None for the first token."""

    prompt_logprobs: list[dict[TokenId, VllmLogprob] | None] | None = None


class VllmAnswer(Struct, frozen=True):
    """What `/v1/completions` answers."""

    choices: list[VllmChoice]


class SglangMeta(Struct, frozen=True):
    """`input_token_logprobs`: [log-probability, id, text] from `logprob_start_len` on; the first
    has no log-probability. `input_top_logprobs`: at each place, as many as were asked for."""

    input_token_logprobs: list[tuple[float | None, TokenId, str | None]] = []
    input_top_logprobs: list[list[tuple[float, TokenId, str | None]] | None] | None = None


class SglangAnswer(Struct, frozen=True):
    """What `/generate` answers."""

    meta_info: SglangMeta


class DecodedTokens(Struct, frozen=True):
    """What `/detokenize` answers: vLLM `prompt`, SGLang `text`."""

    prompt: str | None = None
    text: str | None = None


class Scored(NamedTuple):
    """Log-probabilities of a trajectory's response tokens, in nats, and of the likeliest tokens
    there."""

    logprobs: NDArray[np.float32]
    likeliest: TopLogprobs | None


Place = tuple[float | None, Mapping[int, float]]
"""The log-probability of the token at a place, and those of the likeliest ones by id."""


class RemoteTeacher:
    """A teacher at one engine. `wanted` are token ids of the policy and the text that they decode
    to."""

    def __init__(
        self,
        settings: TeacherSettings,
        of_all: DistillationSettings,
        place: int,
        wanted: tuple[Sequence[int], str],
    ) -> None:
        assert settings.url is not None, "who has a path is in the learner"
        self._settings = settings
        self._field = f"{SETTING}.{place}"
        self._wanted = wanted
        self._model = {} if settings.model is None else {"model": settings.model}
        self._comparing: asyncio.Task[None] | None = None
        self._top_k = of_all.top_k
        with prefixed(self._field):
            given = ServiceSettings(url=settings.url, api_key_env=settings.api_key_env)
            self._service = Service(given, of_all.timeout_s)
        self._limits = RewardLimits(
            f"teacher {settings.name}",
            timeout_s=of_all.timeout_s,
            max_concurrent=of_all.max_concurrent,
            retries=of_all.retries,
        )

    async def score(self, trajectory: Trajectory) -> Scored:
        """Score a trajectory's response tokens. Waits for a slot, for the engine, and before each
        retry.

        Raises:
            RolloutError: the last try failed, was late, or was answered for other tokens.
            ConfigError: the engine's model has another tokenizer.
        """
        try:
            return await self._limits.call(lambda: self._ask(trajectory), self._compared)
        except RolloutError as error:
            raise RolloutError(f"teacher {self._settings.name}: {error}") from error

    async def _ask(self, trajectory: Trajectory) -> Scored:
        token_ids: list[int] = trajectory.token_ids.tolist()
        first = int(trajectory.response_mask.argmax())
        match self._settings.engine:
            case "vllm":
                found = await self._of_vllm(token_ids)
            case "sglang":
                found = await self._of_sglang(token_ids, max(first - 1, 0))
        places = trajectory.response_mask.nonzero()[0].tolist()
        rows = [found.get(place, (None, {})) for place in places]
        pairs = zip(rows, places, strict=True)
        column = [_finite(own, place, token_ids[place]) for (own, _), place in pairs]
        top = _likeliest([others for _, others in rows], self._top_k) if self._top_k else None
        return Scored(np.array(column, np.float32), top)

    async def _of_vllm(self, token_ids: list[int]) -> Mapping[int, Place]:
        """Ask vLLM; the log-probabilities by the place of a token. Waits for the answer."""
        body = {
            **self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self._top_k,
        }
        answer = await self._service.post(
            "/v1/completions", body, VllmAnswer, self._bytes(token_ids)
        )
        rows = (answer.choices[0].prompt_logprobs or []) if answer.choices else []
        _require_length(len(rows), len(token_ids))
        pairs = enumerate(zip(rows, token_ids, strict=True))
        return {
            i: (row[own].logprob, {other: row[other].logprob for other in row})
            for i, (row, own) in pairs
            if row and own in row
        }

    async def _of_sglang(self, token_ids: list[int], first: int) -> Mapping[int, Place]:
        """Ask SGLang; the log-probabilities by the place of a token, from `first` on. Waits for
        it."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first,
            "top_logprobs_num": self._top_k,
        }
        answer = await self._service.post("/generate", body, SglangAnswer, self._bytes(token_ids))
        rows = answer.meta_info.input_token_logprobs
        _require_length(len(rows), len(token_ids) - first)
        top = answer.meta_info.input_top_logprobs or [None] * len(rows)
        _require_length(len(top), len(rows))
        return {
            first + i: (logprob, {other: value for value, other, _ in others or ()})
            for i, ((logprob, own, _), others) in enumerate(zip(rows, top, strict=True))
            if own == token_ids[first + i]
        }

    def _bytes(self, token_ids: list[int]) -> int:
        """The most bytes of an answer."""
        return MAX_ANSWER_BYTES + _LOGPROB_BYTES * (1 + self._top_k) * len(token_ids)

    async def _compared(self) -> None:
        """Wait for the comparison of the tokenizers, which is made once, and again only if it
        failed."""
        if self._comparing is None:
            self._comparing = asyncio.create_task(self._compare())
        task = self._comparing
        try:
            await asyncio.shield(task)
        except RolloutError:
            if self._comparing is task:
                self._comparing = None
            raise

    async def _compare(self) -> None:
        """Compare the engine's tokenizer with the policy's. Waits for the engine. Raises
        ConfigError if they differ; if the engine cannot be asked, a warning is logged."""
        token_ids, wanted = self._wanted
        body = {**self._model, "tokens": token_ids, "skip_special_tokens": False}
        try:
            found = await self._service.post("/detokenize", body, DecodedTokens)
        except FinalError as error:
            log.warning("teacher %s: its tokenizer is not compared: %s", self._settings.name, error)
            return
        text = found.text if found.prompt is None else found.prompt
        if text != wanted:
            raise ConfigError(
                f"{self._field}.url: the engine at {self._settings.url} has another tokenizer than "
                f"the policy: of {len(token_ids)} token ids it makes {_shown(text, wanted)}; serve "
                "a model with the policy's tokenizer, such as a larger one of its family"
            )


def _shown(text: str | None, wanted: str) -> str:
    """Show where the texts begin to differ."""
    found = text or ""
    pairs = enumerate(zip(found, wanted, strict=False))
    start = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(found), len(wanted)))
    return f"{found[start : start + 20]!r} where the policy has {wanted[start : start + 20]!r}"


def _require_length(found: int, wanted: int) -> None:
    if found != wanted:
        raise RolloutError(f"answered with {found} log-probabilities for {wanted} tokens")


def _finite(logprob: float | None, place: int, token_id: int) -> float:
    if logprob is None or not _MINUS_INFINITY < logprob < _ABOVE_ROUNDING:
        raise RolloutError(
            f"answered without a log-probability of token {token_id}, the one at {place}"
        )
    return logprob


def _likeliest(rows: Sequence[Mapping[int, float]], top_k: int) -> TopLogprobs:
    """The `top_k` likeliest of each row (vLLM adds the token itself to them), rounded to float16:
    the error in the KL and its gradient is a hundredth of that of a teacher in bfloat16."""
    few = [len(row) for row in rows if len(row) < top_k]
    if few:
        raise RolloutError(
            f"answered with {few[0]} of the likeliest tokens where algorithm.distillation.top_k "
            f"is {top_k}"
        )
    wrong = [value for row in rows for value in row.values() if not value < _ABOVE_ROUNDING]
    if wrong:
        raise RolloutError(f"answered with a log-probability of {wrong[0]:g}")
    best = [sorted(row.items(), key=itemgetter(1), reverse=True)[:top_k] for row in rows]
    # Impossible tokens are left out.
    kept = [[(i, value) for i, value in row if value > _MINUS_INFINITY] for row in best]
    ids = [np.array([i for i, _ in row], np.int32) for row in kept]
    return TopLogprobs.of(ids, [np.array([value for _, value in row], np.float16) for row in kept])


class RemoteTeachers:
    """Decides which teachers of `algorithm.distillation` score a prompt, and asks those with a
    URL."""

    def __init__(self, settings: DistillationSettings, renderer: ChatRenderer) -> None:
        self._settings = settings
        wanted = renderer.vocabulary_sample(NUM_COMPARED)
        self._teachers = {
            teacher.name: RemoteTeacher(teacher, settings, place, wanted)
            for place, teacher in enumerate(settings.teachers)
            if teacher.url is not None
        }

    @property
    def template(self) -> str | None:
        """The template of what teachers read in place of the prompt."""
        return self._settings.template

    def named_by(self, row: Mapping[str, object]) -> str:
        """The teacher that the row names; "" if all teachers score it.

        Raises:
            RolloutError: the row names no known teacher.
        """
        column = self._settings.column
        if column is None:
            return ""
        known = [teacher.name for teacher in self._settings.teachers]
        if (name := row.get(column)) not in known:
            raise RolloutError(
                f"column {column} of the row names teacher {name!r}; "
                f"{did_you_mean(str(name), known)}"
            )
        return str(name)

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with the answers of its teachers by URL. Waits for them.

        Raises:
            RolloutError: one of them did not score a trajectory, or cannot see its images.
        """
        chosen = [t for t in self._settings.by_url if group.teacher in ("", t.name)]
        if not chosen:
            return group
        if group.media:
            raise RolloutError(
                f"teacher {chosen[0].name}: a teacher by url reads token ids alone, and an episode "
                "has images; name a model folder"
            )
        shown = group.teacher_prompt
        seen = [t if shown is None else t.after(shown) for t in group.trajectories]
        asked = [(t, teacher) for t in seen for teacher in chosen]
        shares = np.array([self._settings.share(teacher) for teacher in chosen], np.float32)
        answers = iter(await together([self._teachers[own.name].score(t) for t, own in asked]))
        scored = []
        for t in group.trajectories:
            own = [next(answers) for _ in chosen]
            column = np.zeros(t.num_tokens, np.float32)
            column[t.response_mask] = shares @ np.stack([one.logprobs for one in own])
            top = own[0].likeliest
            if top is not None:
                counts = np.zeros(t.num_tokens, np.int32)
                counts[t.response_mask] = top.counts
                top = TopLogprobs(counts, top.token_ids, top.logprobs)
            scored.append(structs.replace(t, teacher_logprobs=column, teacher_top_logprobs=top))
        return structs.replace(group, trajectories=tuple(scored))
