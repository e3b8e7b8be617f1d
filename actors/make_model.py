"""A small model, warm-started on the run's task: the one that `model.recipe` describes.

An untrained model is trained on prompts with known answers until some of its answers are right, so
that reinforcement learning has a reward to raise.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from actors.prompts import open_prompts
from actors.rendering.renderer import ChatRenderer, PromptVision, load_media
from streamrl.config import RunConfig
from streamrl.config.model import LLAMA, NOTHING_TO_TEACH, ModelSettings, RecipeSettings
from streamrl.durable_files import new_folder
from streamrl.errors import ConfigError
from streamrl.interfaces import PromptSource
from streamrl.model_folder import ModelFolder
from streamrl.types import Media
from streamrl.user_code import attributed_to, load_user_code
from streamrl.vision.families import load_pretrained
from streamrl.vision.tower import VisionTower

log = logging.getLogger(__name__)

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_CHECK_EVERY = 5
_WARM_UP = 20
# Prompts far away from those that reinforcement learning starts with.
_FIRST_PROMPT = 2**30
_ANY_LENGTH = 2**30


def make_model(config: RunConfig) -> None:
    """Make the model of `model.recipe` and save it, complete or not at all, at `model.path`.

    Raises:
        ConfigError: there is no recipe, its architecture cannot be made, or the prompts use
            characters outside its alphabet or have no answers.
    """
    recipe = config.model.recipe
    if recipe is None:
        raise ConfigError(f"model.path: there is no {config.model.path}, and no model.recipe")
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    torch.manual_seed(config.run.seed)
    with new_folder(Path(config.model.path)) as unfinished:
        _write_untrained(unfinished, recipe, config.max_model_len)
        if not recipe.warm_start_steps:
            return
        student, data = Student.of(unfinished, config), config.data
        if recipe.warm_start_source is not None:
            own = {"source": recipe.warm_start_source, "source_kwargs": {}}
            data = data.model_copy(update=own)
        accuracy = _warm_start(student, open_prompts(data, config.run.seed), recipe)
        log.info("warm start ends: %.2f of sampled answers are right", accuracy)
        student.model.save_pretrained(unfinished)


def _write_untrained(folder: Path, recipe: RecipeSettings, max_model_len: int) -> None:
    """The model with random weights, and its tokenizer."""
    if recipe.architecture == LLAMA:
        tokenizer = make_tokenizer(recipe.alphabet)
        tokenizer.save_pretrained(folder)
        LlamaForCausalLM(_llama(recipe, max_model_len, tokenizer)).save_pretrained(folder)
        return
    setting = "model.recipe.architecture"
    write = load_user_code(setting, recipe.architecture)
    with attributed_to(f"{setting}: {recipe.architecture}"):
        write(folder, recipe, max_model_len)
    if not ModelFolder(folder, setting).has_weights:
        raise ConfigError(f"{setting}: {recipe.architecture} wrote no model into the folder")


def make_tokenizer(alphabet: str, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character, and one for each of `special`."""
    tokens = (*_SPECIAL, *dict.fromkeys(alphabet), *special)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=list(special),
    )


def _llama(
    recipe: RecipeSettings, max_model_len: int, tokenizer: PreTrainedTokenizerFast
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=max(64, max_model_len),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Student:
    """The model that is made, with what reads its prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    tower: VisionTower | None

    @classmethod
    def of(cls, folder: Path, config: RunConfig) -> "Student":
        path = str(folder)
        model = load_pretrained(path, dtype=torch.float32, trust_remote_code=False).train()
        tokenizer = AutoTokenizer.from_pretrained(path)
        vision = PromptVision.of(ModelSettings(path=path))
        # What a run's prompts are cut to does not hold for what the model is warm-started on.
        data = config.data.model_copy(update={"max_prompt_length": _ANY_LENGTH})
        tower = None if vision is None else VisionTower(model, vision.reader)
        return cls(model, tokenizer, ChatRenderer(tokenizer, data, vision), tower)

    def logits(self, batch: "Examples") -> torch.Tensor:
        """[B, T, V] behind each token but the last."""
        read = batch.token_ids[:, :-1]
        inputs = {"input_ids": read} if self.tower is None else self.tower.inputs(read, batch.media)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits


@dataclass(frozen=True)
class Examples:
    """Prompts with their answers, padded on the right."""

    token_ids: torch.Tensor
    """[B, T]"""
    is_answer: torch.Tensor
    """[B, T] bool"""
    media: tuple[tuple[Media, ...], ...]


def _warm_start(student: Student, prompts: PromptSource, recipe: RecipeSettings) -> float:
    """Supervised steps until enough sampled answers are right; returns the share that is."""
    model = student.model
    kind, num_millions = model.config.model_type, model.num_parameters() / 1e6
    log.info("a %s of %.2f M parameters", kind, num_millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARM_UP, total_iters=_WARM_UP)
    batches = _batches(prompts, student, recipe.batch_size)
    accuracy = _sampled_accuracy(student, next(batches))
    for step in range(1, recipe.warm_start_steps + 1):
        batch = next(batches)
        loss = -_answer_logprobs(student, batch).sum() / batch.is_answer.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if step % _CHECK_EVERY == 0:
            accuracy = _sampled_accuracy(student, next(batches))
            log.info("step %d: loss %.3f, sampled accuracy %.3f", step, loss.item(), accuracy)
            if accuracy >= recipe.warm_start_accuracy:
                break
    return accuracy


def _batches(prompts: PromptSource, student: Student, batch_size: int) -> Iterator[Examples]:
    tokenizer, renderer = student.tokenizer, student.renderer
    for first in itertools.count(_FIRST_PROMPT, batch_size):
        rows = [load_media(prompts[number]) for number in range(first, first + batch_size)]
        asked = [renderer.encode(row) for row in rows]
        answers = [[*tokenizer(row.answer)["input_ids"], tokenizer.eos_token_id] for row in rows]
        unknown = tokenizer.unk_token_id
        for row, ids in zip(rows, asked, strict=True):
            if unknown in ids:
                raise ConfigError(
                    f"model.recipe.alphabet: lacks a character of the prompt {row.content!r}"
                )
            if not (ids and row.answer):
                raise ConfigError(NOTHING_TO_TEACH)
        longest = max(len(a) + len(b) for a, b in zip(asked, answers, strict=True))
        token_ids = torch.full((batch_size, longest), tokenizer.pad_token_id)
        is_answer = torch.zeros(batch_size, longest, dtype=torch.bool)
        for i, (question, answer) in enumerate(zip(asked, answers, strict=True)):
            end = len(question) + len(answer)
            token_ids[i, :end] = torch.tensor([*question, *answer])
            is_answer[i, len(question) : end] = True
        yield Examples(token_ids, is_answer, tuple(renderer.media_of(row) for row in rows))


def _answer_logprobs(student: Student, batch: Examples) -> torch.Tensor:
    """Log-probability of each answer token [B, T], 0 elsewhere."""
    logprobs = student.logits(batch).log_softmax(-1)
    chosen = logprobs.gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen * batch.is_answer[:, 1:], (1, 0))


@torch.no_grad()
def _sampled_accuracy(student: Student, batch: Examples) -> float:
    """The chance that an answer sampled at temperature 1 is right: exact, without sampling."""
    return float(_answer_logprobs(student, batch).sum(-1).exp().mean())
