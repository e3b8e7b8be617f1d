"""The reward `reward_model`: a sequence classifier reads the conversation, with its own tokenizer,
chat template and device.

Invariant: one forward pass runs at a time, in a thread; the event loop never waits for it.

A causal classifier reads its score at the last token that is not its configured pad token. The pad
token used here occurs in no conversation of the pass, so each is scored as if it were alone.
Padding after the last token changes nothing in a causal model, and an encoder in `PADDED` masks it.
Every other model, and one whose rotary frequencies depend on the length of a pass, gets
conversations of one length, without padding.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
)

from actors.concurrency import Threads
from actors.engines.model import device_of
from actors.rendering.chat_template import rendered
from actors.rewards.forms import conversation
from streamrl.config.section import Device, Dtype, NotNegative, Positive, Section
from streamrl.errors import ConfigError, RolloutError, read_text
from streamrl.interfaces import Episode

_CAUSAL = """
arcee bloom deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon gemma gemma2 gemma3_text glm glm4
gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium hunyuan_v1_dense jamba jetmoe llama minicpm3
minimax ministral ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 opt
phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm
starcoder2 zamba2
"""
_ENCODERS = """
albert bert camembert deberta deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta
"""
PADDED = frozenset([*_CAUSAL.split(), *_ENCODERS.split()])
"""Model types whose scores do not change with padding on the right; each is tested."""
_BY_LENGTH = frozenset({"dynamic", "longrope"})
_NONE = -1


def may_be_padded(config: PreTrainedConfig) -> bool:
    """Whether conversations of different lengths may share a pass."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # One entry for all layers, or one per type of layer.
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    kinds = {own.get("rope_type") for own in (rotary, *nested)}
    return config.model_type in PADDED and not kinds & _BY_LENGTH


def check_family(config: PreTrainedConfig) -> None:
    """Check that a classifier of this model type scores a conversation as a whole.

    Raises:
        ConfigError: it does not, or there is no classifier of this type.
    """
    kind, remote = config.model_type, getattr(config, "auto_map", None) or {}
    if config.is_encoder_decoder:
        raise ConfigError(
            f"path: the model is of type {kind}, an encoder with a decoder, which reads its score "
            "at end-of-sequence tokens of the conversation; use a causal model or an encoder"
        )
    is_known = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not is_known and "AutoModelForSequenceClassification" not in remote:
        raise ConfigError(
            f"path: the model is of type {kind}, and transformers has no sequence classifier of it"
        )


def logits_of(
    model: Any, rows: Sequence[Sequence[int]], pad_token_id: int | None = None
) -> torch.Tensor:
    """Logits [B, labels] of conversations given as token ids, each scored as if it were alone.

    Args:
        rows: of one length, unless the model `may_be_padded`.
        pad_token_id: preferred for padding, if no conversation contains it.
    """
    longest = max(map(len, rows))
    pad = _NONE
    if any(len(row) < longest for row in rows):
        pad = _unused(rows, model.config.get_text_config().vocab_size, pad_token_id)
        if pad == _NONE:
            return torch.cat([logits_of(model, [row]) for row in rows])
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    # The model finds the last token of each row by it.
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad
    logits: torch.Tensor = model(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device)
    ).logits
    return logits.float()


def _unused(rows: Sequence[Sequence[int]], vocab_size: int, preferred: int | None) -> int:
    """A token that no row contains; `_NONE` if there is none."""
    used = {token for row in rows for token in row}
    candidates = chain([] if preferred is None else [preferred], range(vocab_size))
    return next((token for token in candidates if token not in used), _NONE)


@dataclass(eq=False)
class _Waiting:
    """A conversation that waits for its score."""

    token_ids: list[int]
    score: "asyncio.Future[float]"


class RewardModel:
    """The reward model of one generator. It is loaded when the first group is scored."""

    class Settings(Section):
        path: str
        """The classifier: a folder or a model name on the hub."""
        tokenizer: str | None = None
        """Its tokenizer, if it is elsewhere."""
        chat_template: Literal["native", "none"] | Path = "native"
        """`native` uses the tokenizer's, if it has one; `none` joins the texts of the messages; a
        path names a Jinja file."""
        device: Device = "auto"
        """The device it runs on; `auto` is cuda if available, else cpu."""
        dtype: Dtype = "float32"
        """Type of its weights."""
        label: NotNegative = 0
        """For a classifier with several labels, the label whose probability is the reward. With one
        label the reward is the raw output."""
        max_length: Positive = 4096
        """Most tokens of a conversation; longer ones lose their beginning."""
        max_tokens_per_batch: Positive = 16_384
        """Most tokens of a forward pass, including padding."""
        trust_remote_code: bool = False
        """Run code that comes with the model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: list[_Waiting] = []
        self._batches: asyncio.Task[None] | None = None
        self._threads = Threads("reward model")
        self._template: str | None = None
        if isinstance(settings.chat_template, Path):
            self._template = read_text(settings.chat_template, "chat_template")
        self._is_padded = may_be_padded(_checked(settings))

    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Score episodes. Waits for the forward passes of these and of conversations that came
        before."""
        rows = await self._threads.run(lambda: [self._token_ids(e) for e in episodes])
        own = [_Waiting(row, asyncio.get_running_loop().create_future()) for row in rows]
        self._waiting = [*self._waiting, *own]
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._score_waiting())
        return list(await asyncio.gather(*(one.score for one in own)))

    async def _score_waiting(self) -> None:
        """Score in one forward pass after the other, until no conversation waits. Waits for each
        pass."""
        while batch := self._next_batch():
            rows = [one.token_ids for one in batch]
            scores: Sequence[float | RolloutError]
            try:
                scores = await self._threads.run(partial(self._forward, rows))
            except Exception as error:
                scores = [RolloutError(f"{type(error).__name__}: {error}")] * len(batch)
            for one, score in zip(batch, scores, strict=True):
                if one.score.done():  # The task that waited for it was canceled.
                    continue
                if isinstance(score, RolloutError):
                    one.score.set_exception(score)
                else:
                    one.score.set_result(score)

    def _next_batch(self) -> list[_Waiting]:
        """Take the shortest waiting conversations, as many as fit into a forward pass, at least
        one; all of one length if the model cannot be padded."""
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
        """Scores of conversations as token ids. Runs in a thread."""
        with torch.inference_mode():
            logits = logits_of(self._model, rows, self._tokenizer.pad_token_id)
        if logits.shape[-1] > 1:
            logits = logits.softmax(-1)[:, self._settings.label : self._settings.label + 1]
        scores: list[float] = logits[:, 0].tolist()
        return scores

    def _token_ids(self, episode: Episode) -> list[int]:
        """The episode's token ids, at least one; else a RolloutError. Runs in a thread."""
        template = self._template or self._tokenizer.chat_template
        messages = conversation(episode)
        if self._settings.chat_template == "none" or template is None:
            text = "".join(str(message.get("content") or "") for message in messages)
            return self._cut(text, add_special_tokens=True)
        try:
            text = rendered(self._tokenizer, messages, chat_template=template)
        except ValueError as error:
            raise RolloutError(f"its chat template cannot render the episode: {error}") from error
        return self._cut(text, add_special_tokens=False)

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
        return model.to(device_of(settings.device)).eval()


def _checked(settings: RewardModel.Settings) -> PreTrainedConfig:
    """Load and check the model's configuration, without its weights; it must score
    conversations."""
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
