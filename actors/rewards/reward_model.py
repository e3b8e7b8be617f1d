"""The reward `reward_model`: a sequence classifier reads the conversation, with a tokenizer and a
chat template of its own, on a device of its own.

    score            tokenizes, queues, waits
    one batch task   takes what waits, shortest first, up to the token budget; while there is any

Invariant: one forward pass runs at a time, in a thread; the event loop never waits for it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
)

from actors.rewards.calls.threads import Threads
from actors.rewards.classifiers import check_family, logits_of, may_be_padded
from actors.rewards.forms import conversation
from streamrl.config.numbers import Device, Dtype, NotNegative, Positive
from streamrl.config.section import Section
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Episode


@dataclass(eq=False)
class _Waiting:
    """A conversation that waits for its score."""

    token_ids: list[int]
    score: "asyncio.Future[float]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RewardModel:
    """Of one generator. It is loaded when the first group is scored."""

    class Settings(Section):
        """Arguments of `reward_model`."""

        path: str
        """The classifier: a folder or a name of the hub."""
        tokenizer: str | None = None
        """Its tokenizer, if it stands elsewhere."""
        chat_template: Literal["native", "none"] | Path = "native"
        """`native` uses the tokenizer's, if it has one; `none` reads prompt and response one after
        the other; a path names a Jinja file."""
        device: Device = "auto"
        """Where it runs; `auto` is cuda, if there is one, else cpu."""
        dtype: Dtype = "float32"
        """Of its weights."""
        label: NotNegative = 0
        """Of a classifier with several labels, the one whose probability is the reward. With one
        label the reward is its output as it stands."""
        max_length: Positive = 4096
        """Tokens of a conversation; of longer ones the beginning is cut."""
        max_tokens_per_batch: Positive = 16_384
        """Tokens of a forward pass, padding included."""
        trust_remote_code: bool = False
        """Run code that comes with the model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: list[_Waiting] = []
        self._batches: asyncio.Task[None] | None = None
        self._threads = Threads("reward model")
        self._template = _template(settings)
        self._is_padded = may_be_padded(_checked(settings))

    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Waits for the forward passes of the conversations that came before, and of these."""
        rows = await self._threads.run(lambda: [self._token_ids(e) for e in episodes])
        own = [_Waiting(row) for row in rows]
        self._waiting = [*self._waiting, *own]
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._score_waiting())
        return list(await asyncio.gather(*(one.score for one in own)))

    async def _score_waiting(self) -> None:
        """Waits for one forward pass after the other, until nothing waits."""
        while batch := self._next_batch():
            rows = [one.token_ids for one in batch]
            try:
                scores = await self._threads.run(partial(self._forward, rows))
            except Exception as error:
                _refuse(batch, RolloutError(f"{type(error).__name__}: {error}"))
            else:
                for one, score in zip(batch, scores, strict=True):
                    if not one.score.done():
                        one.score.set_result(score)

    def _next_batch(self) -> list[_Waiting]:
        """The shortest that wait, as many as fit into a forward pass, at least one; of one length,
        if the model cannot be padded."""
        waiting = [one for one in self._waiting if not one.score.done()]
        ordered = sorted(waiting, key=lambda one: len(one.token_ids))
        if not self._is_padded:
            shortest = len(ordered[0].token_ids) if ordered else 0
            ordered = [one for one in ordered if len(one.token_ids) == shortest]
        budget = self._settings.max_tokens_per_batch
        fitting = (n for n, one in enumerate(ordered, 1) if n * len(one.token_ids) <= budget)
        batch = ordered[: max(fitting, default=1)]
        self._waiting = [one for one in waiting if one not in batch]
        return batch

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The scores of the token ids. In a thread."""
        with torch.inference_mode():
            logits = logits_of(self._model, rows, self._tokenizer.pad_token_id)
        if logits.shape[-1] > 1:
            logits = logits.softmax(-1)[:, self._settings.label : self._settings.label + 1]
        scores: list[float] = logits[:, 0].tolist()
        return scores

    def _token_ids(self, episode: Episode) -> list[int]:
        """At least one. In a thread.

        Raises:
            RolloutError: it has none.
        """
        template = self._template or self._tokenizer.chat_template
        messages = conversation(episode)
        if self._settings.chat_template == "none" or template is None:
            text = "".join(str(message.get("content") or "") for message in messages)
            return self._cut(text, add_special_tokens=True)
        return self._cut(self._rendered(messages, template), add_special_tokens=False)

    def _cut(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The last tokens of the text, at most `max_length` with the special ones around them."""
        ids: list[int] = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            truncation=True,
            max_length=self._settings.max_length,
        )["input_ids"]
        if not ids:
            raise RolloutError("the conversation has no tokens")
        return ids

    def _rendered(self, messages: list[dict[str, Any]], template: str) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False
                )
            )
        except TemplateError as error:
            raise RolloutError(f"its chat template cannot render the episode: {error}") from error

    @cached_property
    def _tokenizer(self) -> Any:
        settings = self._settings
        return AutoTokenizer.from_pretrained(
            settings.tokenizer or settings.path,
            trust_remote_code=settings.trust_remote_code,
            truncation_side="left",
        )

    @cached_property
    def _model(self) -> Any:
        settings = self._settings
        model = AutoModelForSequenceClassification.from_pretrained(
            settings.path,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=settings.trust_remote_code,
        )
        has_cuda = torch.cuda.is_available()
        device = settings.device if settings.device != "auto" else "cuda" if has_cuda else "cpu"
        return model.to(device).eval()


def _refuse(batch: Sequence[_Waiting], error: RolloutError) -> None:
    for one in batch:
        if not one.score.done():
            one.score.set_exception(error)


def _template(settings: RewardModel.Settings) -> str | None:
    if not isinstance(settings.chat_template, Path):
        return None
    try:
        return settings.chat_template.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template: cannot read {settings.chat_template}: {error.strerror}"
        ) from error


def _checked(settings: RewardModel.Settings) -> PreTrainedConfig:
    """The model's configuration; its weights are not loaded.

    Raises:
        ConfigError: there is no such model, it scores no conversations, or has no such label.
    """
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            settings.path, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"path: there is no model at {settings.path!r}: {error}") from error
    check_family(found)
    if settings.label >= (found.num_labels or 0):
        raise ConfigError(f"label: was {settings.label}; the model has {found.num_labels} labels")
    return found
