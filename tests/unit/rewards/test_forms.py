"""Functions written for verl and TRL score unchanged, as those of StreamRL do."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from actors.rewards import make_reward
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Episode, Prompt, Score
from streamrl.types import FinishReason
from tests.unit.rewards.episodes import episode

# As the documentation of verl has it.
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["index"] == 3
    if data_source != "gsm8k":
        raise NotImplementedError(data_source)
    return {"score": float(solution_str.strip() == ground_truth), "acc": True, "pred": "text"}
"""
VERL_BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
"""
# As the documentation of TRL has them.
TRL_TEXT = """
def reward_func(completions, ground_truth, **kwargs):
    assert all(len(column) == len(completions) for column in kwargs.values())
    assert kwargs["prompts"] == ["question"] * len(completions)
    return [1.0 if c == gt else 0.0 for c, gt in zip(completions, ground_truth)]
"""
TRL_CHAT = """
async def reward_func(prompts, completions, completion_ids, task=None, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "hi"}]
    assert completion_ids == [[1, 2]] * len(prompts)
    contents = [completion[0]["content"] for completion in completions]
    return [None if t != "math" else float(len(c)) for c, t in zip(contents, task)]
"""
SCORE = """
from streamrl.interfaces import Score
def score(episode):
    return Score(2.0, {"steps": 3.0})
"""


def made(tmp_path: Path, text: str, function: str, **settings: Any):
    file = tmp_path / "mine.py"
    file.write_text(text)
    entry = {"reward": f"{file}:{function}", **settings}
    return make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))


async def test_verls_function_gets_the_columns_of_its_rows_and_its_dict_is_recorded(tmp_path):
    reward = made(tmp_path, VERL, "compute_score")
    row = {
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"index": 3},
    }
    right, wrong = await reward.score([episode("7", **row), episode("8", **row)])
    recorded = {"reward/compute_score": 1.0, "reward/compute_score/acc": 1.0}
    assert right == Score(1.0, recorded, extracted="text")
    assert wrong.reward == 0.0
    with pytest.raises(RolloutError, match=r"compute_score: NotImplementedError: other \(mine.py"):
        await reward.score([episode("7", **{**row, "data_source": "other"})])


async def test_an_argument_of_the_configuration_comes_before_a_column(tmp_path):
    text = "def f(solution_str, data_source):\n    return float(data_source == 'mine')\n"
    reward = made(tmp_path, text, "f", kwargs={"data_source": "mine"})
    assert [s.reward for s in await reward.score([episode("7", data_source="theirs")])] == [1.0]


async def test_verls_batch_function_falls_back_on_the_answer_of_the_row(tmp_path):
    reward = made(tmp_path, VERL_BATCH, "compute_score")
    assert [s.reward for s in await reward.score([episode("42"), episode("4")])] == [1.0, 0.0]


async def test_trls_function_gets_columns_as_lists(tmp_path):
    reward = made(tmp_path, TRL_TEXT, "reward_func")
    episodes = [episode(text, ground_truth="7", level=2) for text in ("7", "8")]
    assert [s.reward for s in await reward.score(episodes)] == [1.0, 0.0]


ASKED = {"role": "user", "content": "hi"}


def chat(task: str, *messages: dict[str, str]) -> Episode:
    prompt = Prompt((ASKED,), "", {"task": task})
    found = Episode(prompt, "abc", 2, FinishReason.STOP, response_token_ids=(1, 2))
    return dataclasses.replace(found, messages=messages)


async def test_trls_completions_are_messages_after_messages_and_none_is_not_applicable(tmp_path):
    reward = made(tmp_path, TRL_CHAT, "reward_func")
    call = {"function": {"name": "add", "arguments": {}}}
    turn = {"role": "assistant", "content": "four", "tool_calls": [call]}
    scores = await reward.score([chat("math"), chat("math", ASKED, turn)])
    assert [s.reward for s in scores] == [3.0, 4.0]
    with pytest.raises(RolloutError, match="reward reward_func applies to no episode"):
        await reward.score([chat("code")])


async def test_trls_completions_have_the_thoughts_that_a_reward_of_the_format_looks_for(tmp_path):
    text = """
def num_thoughts(completions, **kwargs):
    return [float(c[0]["content"].count("2 + 2")) for c in completions]
"""
    parsed = {"role": "assistant", "content": "four", "reasoning_content": "2 + 2"}
    # Special tokens mark those of gpt-oss.
    responses = ("<think>2 + 2</think>four", "analysis2 + 2assistantfinalfour")
    episodes = [dataclasses.replace(chat("math", ASKED, parsed), response=r) for r in responses]
    scores = await made(tmp_path, text, "num_thoughts").score(episodes)
    assert [s.reward for s in scores] == [1.0, 0.0]


async def test_none_of_one_reward_leaves_the_others(tmp_path):
    (tmp_path / "mine.py").write_text(TRL_CHAT)
    entries = [f"{tmp_path}/mine.py:reward_func", {"reward": "length", "weight": 2}]
    entries[1] = {"reward": f"{tmp_path}/own.py:one", "weight": 2}
    (tmp_path / "own.py").write_text("def one(episode):\n    return 1\n")
    reward = make_reward(DataSettings.model_validate({"source": "addition", "rewards": entries}))
    (score,) = await reward.score([chat("code")])
    assert score == Score(2.0, {"reward/one": 1.0})


async def test_a_score_of_ones_own_has_metrics(tmp_path):
    (score,) = await made(tmp_path, SCORE, "score", name="mine").score([episode()])
    assert score == Score(2.0, {"reward/mine": 2.0, "reward/mine/steps": 3.0})


async def test_metrics_of_numpy_are_numbers(tmp_path):
    text = "import numpy as np\n" + SCORE.replace("3.0", "np.float32(3.0)")
    (score,) = await made(tmp_path, text, "score", name="mine").score([episode()])
    assert score == Score(2.0, {"reward/mine": 2.0, "reward/mine/steps": 3.0})
    assert type(score.metrics["reward/mine/steps"]) is float


@pytest.mark.parametrize("value", ["None", "'much'", "float('nan')", "[1.0]"])
async def test_metrics_that_are_no_finite_numbers_fail_the_group(tmp_path, value):
    with pytest.raises(RolloutError, match=r"returned Score.*it must return one finite number"):
        await made(tmp_path, SCORE.replace("3.0", value), "score").score([episode()])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(solution_str, needed):\n    return 1", "missing a required argument: 'needed'"),
        ("def f(completions, trainer_state):\n    return 1", "argument: 'trainer_state'"),
        ("def f(solution_str, ground_truth):\n    return 1", "unexpected keyword argument 'bonus'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(tmp_path, text, sentence):
    (tmp_path / "mine.py").write_text(text)
    kwargs = {"bonus": 1} if "bonus" in sentence else {}
    data = DataSettings(source="copy", reward=f"{tmp_path}/mine.py:f", reward_kwargs=kwargs)
    with pytest.raises(ConfigError, match=rf"data\.reward: .*{sentence}"):
        make_reward(data)
