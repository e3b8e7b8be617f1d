"""A small Llama with a character tokenizer, warm-started on the run's task.

No network and no GPU: the model is made from `model.recipe` and trained on prompts with known
answers until some of its answers are right, so that reinforcement learning has a reward to raise.
"""

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.prompts import open_prompts
from streamrl.config import RunConfig
from streamrl.config.model import RecipeSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import PromptSource

log = logging.getLogger(__name__)

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_CHECK_EVERY = 5
_WARM_UP = 20
# Prompts far away from those that reinforcement learning starts with.
_FIRST_PROMPT = 2**30


def make_model(config: RunConfig) -> None:
    """Make the model of `model.recipe` and save it, complete or not at all, at `model.path`.

    Raises:
        ConfigError: there is no recipe, or the prompts use characters outside its alphabet.
    """
    recipe = config.model.recipe
    if recipe is None:
        raise ConfigError(f"model.path: there is no {config.model.path}, and no model.recipe")
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    torch.manual_seed(config.run.seed)
    tokenizer = make_tokenizer(recipe.alphabet)
    model = LlamaForCausalLM(_architecture(recipe, config.max_model_len, tokenizer))
    log.info("a Llama of %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    accuracy = _warm_start(model, tokenizer, _examples(config, recipe), recipe)
    log.info("warm start ends: %.2f of sampled answers are right", accuracy)
    path = Path(config.model.path)
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(path)


def _examples(config: RunConfig, recipe: RecipeSettings) -> PromptSource:
    """Prompts with their answers."""
    if recipe.warm_start_source is None:
        return open_prompts(config.data, config.run.seed)
    own = {"source": recipe.warm_start_source, "source_kwargs": {}}
    return open_prompts(config.data.model_copy(update=own), config.run.seed)


def make_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character."""
    tokens = (*_SPECIAL, *dict.fromkeys(alphabet))
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
    )


def _architecture(
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


def _warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: PromptSource,
    recipe: RecipeSettings,
) -> float:
    """Supervised steps until enough sampled answers are right; returns the share that is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARM_UP, total_iters=_WARM_UP)
    batches = _batches(prompts, tokenizer, recipe.batch_size)
    accuracy = _sampled_accuracy(model, *next(batches))
    for step in range(1, recipe.warm_start_steps + 1):
        token_ids, is_answer = next(batches)
        loss = -_answer_logprobs(model, token_ids, is_answer).sum() / is_answer.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if step % _CHECK_EVERY == 0:
            accuracy = _sampled_accuracy(model, *next(batches))
            log.info("step %d: loss %.3f, sampled accuracy %.3f", step, loss.item(), accuracy)
            if accuracy >= recipe.warm_start_accuracy:
                break
    return accuracy


def _batches(
    prompts: PromptSource, tokenizer: PreTrainedTokenizerFast, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [B, T], padded on the right, and where the answer stands [B, T] bool."""
    for first in itertools.count(_FIRST_PROMPT, batch_size):
        rows = [prompts[prompt_index] for prompt_index in range(first, first + batch_size)]
        asked = [tokenizer(str(row.content))["input_ids"] for row in rows]
        answers = [[*tokenizer(row.answer)["input_ids"], tokenizer.eos_token_id] for row in rows]
        unknown = tokenizer.unk_token_id
        for row, ids in zip(rows, asked, strict=True):
            if unknown in ids:
                raise ConfigError(
                    f"model.recipe.alphabet: lacks a character of the prompt {row.content!r}"
                )
        longest = max(len(a) + len(b) for a, b in zip(asked, answers, strict=True))
        token_ids = torch.full((batch_size, longest), tokenizer.pad_token_id)
        is_answer = torch.zeros(batch_size, longest, dtype=torch.bool)
        for i, (question, answer) in enumerate(zip(asked, answers, strict=True)):
            end = len(question) + len(answer)
            token_ids[i, :end] = torch.tensor([*question, *answer])
            is_answer[i, len(question) : end] = True
        yield token_ids, is_answer


def _answer_logprobs(
    model: LlamaForCausalLM, token_ids: torch.Tensor, is_answer: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each answer token [B, T], 0 elsewhere."""
    logprobs = model(token_ids[:, :-1]).logits.log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen * is_answer[:, 1:], (1, 0))


@torch.no_grad()
def _sampled_accuracy(
    model: LlamaForCausalLM, token_ids: torch.Tensor, is_answer: torch.Tensor
) -> float:
    """The chance that an answer sampled at temperature 1 is right: exact, without sampling."""
    return float(_answer_logprobs(model, token_ids, is_answer).sum(-1).exp().mean())
