"""The running batch: requests join, get one token per step, and leave when done.

Invariant: every token was sampled by the weights of the version recorded with it, and a request's
result does not depend on the other requests (up to floating-point rounding). Not thread safe: only
the engine's thread uses it. Shapes: n running rows, P distinct prompts, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray
from transformers import PreTrainedModel

from actors.engines.hf.cache import Compaction, SlotCache, cache_of
from actors.engines.hf.records import Experts, ExpertWatch, Records
from actors.engines.hf.sampling import sample
from actors.engines.requests import stops_of
from streamrl.interfaces import CompletionHandle
from streamrl.placement.limits import facts_of, require_decoding
from streamrl.types import Completion, FinishReason, Media, SamplingParams
from streamrl.vision.tower import VisionTower

_PREFILL_TOKENS = 16384


class HfRequest(Struct, eq=False):
    """One request; `is_canceled` and the handle's `stop` may be set at any time, from any
    thread."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    handle: CompletionHandle = field(default_factory=CompletionHandle)
    is_canceled: bool = False
    media: tuple[Media, ...] = ()
    offset: int = 0
    """Offset of positions after the prompt in the position embedding; see `VisionTower.offset`."""

    @property
    def is_stopped(self) -> bool:
        return self.handle.stop.is_set()

    @property
    def content(self) -> "Content":
        return Content(self.prompt, self.media)


class Content(NamedTuple):
    """A prompt, which a prefill computes once for all requests that have it."""

    token_ids: tuple[int, ...]
    media: tuple[Media, ...]


class RunningBatch:
    """Up to `num_slots` requests that advance together."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        tower: VisionTower | None = None,
        watches_experts: bool = False,
    ) -> None:
        self._tower = tower
        self._model = model
        config = model.config.get_text_config()
        self._device = next(model.parameters()).device
        self._max_model_len = max_model_len
        self._stops = StopSets(eos_token_ids, config.vocab_size)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        require_decoding(facts_of(config), max_model_len)
        self._cache = cache_of(model, num_slots, self._device)
        self._records = Records(num_slots)
        self._watch = ExpertWatch(model) if watches_experts else None
        self._rows: list[HfRequest] = []
        self._seeded: dict[HfRequest, torch.Generator] = {}
        self.num_slots = num_slots
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def join(self, requests: Iterable[HfRequest], policy_version: int) -> None:
        """Prefills the prompts, equal ones once, and samples each request's first token."""
        by_length = sorted(requests, key=lambda request: len(request.prompt))
        waiting = iter(by_length)
        for chunk in self._chunks([request.content for request in by_length]):
            first = len(self._rows)
            logits, experts = self._prefill(first, chunk)
            for of_prompt in experts:
                self._open(next(waiting), of_prompt)
            self._sample(first, logits, policy_version)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute the caches of the running rows again, with the current weights."""
        self._cache.clear()
        first = 0
        # A row's last token is the input of its next step.
        contents = [
            Content((*r.prompt, *self._records.token_ids(row)[:-1].tolist()), r.media)
            for row, r in enumerate(self._rows)
        ]
        for chunk in self._chunks(contents):
            self._prefill(first, chunk, is_recorded=False)
            first += len(chunk)

    @torch.inference_mode()
    def step(self, policy_version: int) -> None:
        """Samples one more token for every row."""
        places, offsets = self._records.positions, self._records.columns["offset"]
        positions = torch.from_numpy(places).to(self._device)
        embedded = torch.from_numpy(places + offsets).to(self._device)
        last = torch.from_numpy(self._records.last_token_ids).to(self._device)
        output = self._model(
            input_ids=last[:, None],
            position_ids=embedded[:, None],
            use_cache=True,
            **self._cache.point_at(positions, self._model.dtype),
        )
        if self._watch is not None and self._records.keep_experts:
            rows = self._watch.of_rows([1] * len(last), is_left_padded=False)
            self._records.append_experts(rows)
        self._sample(0, output.logits[:, -1], policy_version)

    @torch.inference_mode()
    def leave(self) -> list[tuple[HfRequest, Completion]]:
        """Removes the rows that are done, stopped or canceled."""
        records, columns = self._records, self._records.columns
        is_stop = self._stops.contains(columns["stop_set"], records.last_token_ids)
        is_full = columns["count"] >= columns["limit"]
        is_over = np.array([r.is_canceled or r.is_stopped for r in self._rows], dtype=np.bool_)
        leaves = is_stop | is_full | is_over
        left = []
        for row in np.flatnonzero(leaves)[::-1].tolist():
            request = self._rows[row]
            reason = FinishReason.DEADLINE if request.is_stopped else FinishReason.ABORT
            reason = FinishReason.LENGTH if is_full[row] else reason
            reason = FinishReason.STOP if is_stop[row] else reason
            left.append((request, records.completion(row, reason)))
            self._seeded.pop(request, None)
        if left:
            moves = Compaction.of(leaves)
            self._cache.compact(moves, int(records.positions[moves.sources].max(initial=0)))
            records.compact(moves)
            moves.apply(self._rows)
        for row, request in enumerate(self._rows):
            if request.handle.is_asked:
                request.handle.sampled = records.completion(row, FinishReason.ABORT)
                request.handle.is_asked = False
        return left

    def _open(self, request: HfRequest, experts: Experts | None) -> None:
        sampling = request.sampling
        limit = min(sampling.max_new_tokens, self._max_model_len - len(request.prompt))
        stop_set = self._stops.index_of(sampling)
        self._records.open(len(request.prompt), limit, sampling, stop_set, request.offset, experts)
        self._rows.append(request)
        if sampling.seed is not None:
            self._seeded[request] = torch.Generator().manual_seed(sampling.seed)

    def _prefill(
        self, first: int, contents: list[Content], *, is_recorded: bool = True
    ) -> tuple[torch.Tensor, Sequence[Experts | None]]:
        """Logits [k, V] after each prompt's last token, and its tokens' experts if they are
        recorded; rows first, first + 1, ... continue from here."""
        unique = list(dict.fromkeys(contents))
        index = {content: i for i, content in enumerate(unique)}
        of = torch.tensor([index[content] for content in contents], device=self._device)
        inputs, last = self._cache.prefill([content.token_ids for content in unique])
        seen = inputs
        if self._tower is not None:
            seen = {key: value for key, value in inputs.items() if key != "input_ids"}
            media = [content.media for content in unique]
            seen = {**seen, **self._tower.inputs(inputs["input_ids"], media)}
        output = self._model(**seen, use_cache=True)
        self._cache.join(first, inputs, of)
        experts: Sequence[Experts | None] = [None] * len(unique)
        if self._watch is not None and is_recorded:
            lengths = [len(content.token_ids) for content in unique]
            is_left_padded = not isinstance(self._cache, SlotCache)
            experts = self._watch.of_rows(lengths, is_left_padded=is_left_padded)
        return output.logits[of, last[of]], [experts[index[content]] for content in contents]

    def _chunks(self, contents: list[Content]) -> Iterator[list[Content]]:
        """Runs of contents that share a prefill: at most _PREFILL_TOKENS including padding, and of
        equal length if the model would read padding."""
        joins_lengths = self._cache.joins_lengths and (
            self._tower is None or isinstance(self._cache, SlotCache)
        )
        chunk: list[Content] = []
        longest = 0
        for content in contents:
            length = len(content.token_ids)
            is_other = bool(chunk) and length != longest and not joins_lengths
            if is_other or (chunk and (len(chunk) + 1) * max(longest, length) > _PREFILL_TOKENS):
                yield chunk
                chunk, longest = [], 0
            chunk, longest = [*chunk, content], max(longest, length)
        if chunk:
            yield chunk

    def _sample(self, first: int, logits: torch.Tensor, policy_version: int) -> None:
        records = self._records
        requests, columns = self._rows[first:], records.columns[first:]
        is_short = columns["count"] < columns["minimum"]
        if is_short.any():
            logits = self._stops.forbid(logits.clone(), columns["stop_set"], is_short)
        seeded = enumerate(map(self._seeded.get, requests if self._seeded else ()))
        sampled = sample(
            logits,
            columns,
            self._generator,
            [(row, own) for row, own in seeded if own is not None],
            keeps_mask=records.keeps_mask,
            num_top=records.num_top,
        )
        records.append(first, sampled, policy_version)
        for request, count in zip(requests, columns["count"].tolist(), strict=True):
            request.handle.num_tokens = count
        self.num_tokens += len(logits)


class StopSets:
    """The tokens that end a completion: one table row [V] for each distinct set."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._table = np.zeros((0, vocab_size), dtype=np.bool_)
        self._index: dict[frozenset[int], int] = {}

    def index_of(self, sampling: SamplingParams) -> int:
        stops = stops_of(sampling, self._eos_token_ids)
        if stops not in self._index:
            row = np.zeros((1, self._table.shape[1]), dtype=np.bool_)
            row[0, [token for token in stops if token < row.shape[1]]] = True
            self._index[stops] = len(self._table)
            self._table = np.concatenate([self._table, row])
        return self._index[stops]

    def contains(self, sets: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        is_stop: NDArray[np.bool_] = self._table[sets, token_ids]
        return is_stop

    def forbid(
        self, logits: torch.Tensor, sets: NDArray[np.int64], rows: NDArray[np.bool_]
    ) -> torch.Tensor:
        """Set the logits of these rows' stop tokens to -inf, in place."""
        stops = torch.from_numpy(self._table[sets] & rows[:, None]).to(logits.device)
        return logits.masked_fill_(stops, -torch.inf)
