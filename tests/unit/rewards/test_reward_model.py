"""A tiny sequence classifier, made here, scores conversations with its own tokenizer."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from actors.make_model import make_tokenizer
from actors.rewards import make_reward
from actors.rewards.reward_model import RewardModel
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Reward
from tests.unit.rewards.episodes import episode, values

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module", params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With this many labels."""
    path = tmp_path_factory.mktemp("classifier")
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz<> ")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=request.param,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def made(folder: Path, **kwargs: object) -> Reward:
    entry = {"reward": "reward_model", "kwargs": {"path": str(folder), "device": "cpu", **kwargs}}
    return make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))


def expected(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0]
    return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[0])


def expected_at_the_end(folder: Path, text: str) -> float:
    """Of a batch of one, by a model that looks for no pad token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0]
    return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[0])


RESPONSES = ("a", "the longest response of all these", "short", "of some length")


def rendered(response: str) -> str:
    return f"<user>question<assistant>{response}"


async def test_padded_batches_score_as_single_rows_in_their_template(folder):
    scores = values(await made(folder).score([episode(r) for r in RESPONSES]))
    single = [expected(folder, rendered(r)) for r in RESPONSES]
    assert scores == pytest.approx(single, abs=1e-5)
    assert len({round(score, 6) for score in scores}) == len(scores)


@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("end", ["</s>", "", "</s>a</s></s>"])
async def test_a_score_is_read_at_the_last_token_whatever_it_is(tmp_path, folder, pad, side, end):
    copied = shutil.copytree(folder, tmp_path / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.pad_token, tokenizer.padding_side = pad, side
    tokenizer.chat_template = f"{TEMPLATE}{end}"
    tokenizer.save_pretrained(copied)
    read = [f"{rendered(r)}{end}" for r in RESPONSES]
    scores = values(await made(copied).score([episode(r) for r in RESPONSES]))
    assert scores == pytest.approx([expected_at_the_end(copied, t) for t in read], abs=1e-5)


async def test_a_model_that_cannot_be_padded_is_given_rows_of_one_length(folder, monkeypatch):
    monkeypatch.setattr("actors.rewards.reward_model.may_be_padded", lambda config: False)
    lengths, forward = [], RewardModel._forward

    def noting(self, rows):
        lengths.append([len(row) for row in rows])
        return forward(self, rows)

    monkeypatch.setattr(RewardModel, "_forward", noting)
    responses = [*RESPONSES, *RESPONSES]
    scores = values(await made(folder).score([episode(r) for r in responses]))
    single = [expected(folder, rendered(r)) for r in responses]
    assert scores == pytest.approx(single, abs=1e-5)
    assert [len(batch) for batch in lengths] == [2] * 4
    assert all(len(set(batch)) == 1 for batch in lengths)


async def test_special_tokens_around_a_long_conversation_are_kept(tmp_path, folder):
    copied = shutil.copytree(folder, tmp_path / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(copied)
    ids = [("</s>", tokenizer.eos_token_id), ("<pad>", tokenizer.pad_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="</s> $A <pad>", special_tokens=ids
    )
    tokenizer.save_pretrained(copied)
    (score,) = values(
        await made(copied, chat_template="none", max_length=5).score([episode("abcdefgh")])
    )
    assert score == pytest.approx(expected_at_the_end(copied, "</s>fgh<pad>"), abs=1e-5)


async def test_groups_that_come_together_are_batched_within_the_budget(folder, monkeypatch):
    sizes, forward = [], RewardModel._forward

    def noting(self, rows):
        sizes.append((len(rows), max(map(len, rows))))
        return forward(self, rows)

    monkeypatch.setattr(RewardModel, "_forward", noting)
    reward = made(folder, max_tokens_per_batch=100)
    groups = [[episode(r) for r in RESPONSES] for _ in range(4)]
    scored = await asyncio.gather(*(reward.score(group) for group in groups))
    assert sum(rows for rows, _ in sizes) == 16
    assert all(rows * longest <= 100 for rows, longest in sizes)
    assert max(rows for rows, _ in sizes) > 1
    single = [expected(folder, rendered(r)) for r in RESPONSES]
    assert all(values(scores) == pytest.approx(single, abs=1e-5) for scores in scored)


async def test_the_beginning_of_a_long_conversation_is_cut(folder):
    (score,) = values(await made(folder, max_length=5).score([episode("abcdefgh")]))
    assert score == pytest.approx(expected(folder, "defgh"), abs=1e-5)


async def test_without_a_template_prompt_and_response_stand_together(folder):
    (score,) = values(await made(folder, chat_template="none").score([episode("abc")]))
    assert score == pytest.approx(expected(folder, "questionabc"), abs=1e-5)


async def test_a_forward_pass_that_fails_fails_its_groups_at_once(folder, monkeypatch):
    def outside(self, rows):
        # What torch raises for a position that the model has no embedding of.
        raise IndexError("index out of range in self")

    reward = made(folder)
    with monkeypatch.context() as broken:
        broken.setattr(RewardModel, "_forward", outside)
        async with asyncio.timeout(120):
            with pytest.raises(RolloutError, match="IndexError: index out of range in self"):
                await reward.score([episode("a")])
    assert values(await reward.score([episode("a")])) == pytest.approx(
        [expected(folder, rendered("a"))], abs=1e-5
    )


async def test_a_group_that_is_given_up_does_not_harm_the_others(folder):
    reward = made(folder)
    given_up = asyncio.create_task(reward.score([episode("a")]))
    await asyncio.sleep(0)
    kept = asyncio.create_task(reward.score([episode("a")]))
    given_up.cancel()
    assert values(await kept) == pytest.approx([expected(folder, rendered("a"))], abs=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"path": "/nowhere/at/all"}, r"rewards\[0\]\.kwargs\.path: there is no model at"),
        ({"label": 3}, r"kwargs\.label: was 3; the model has . labels"),
        ({"chat_template": "nowhere.jinja"}, r"kwargs\.chat_template: cannot read nowhere\.jinja"),
        ({"device": "tpu"}, r"kwargs\.device: was 'tpu'"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder, kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        made(folder, **kwargs)
