"""Rewards: the built-in ones judge, a user's own is loaded, and neither can harm a run."""

import json
from pathlib import Path

import pytest

from actors.make_model import make_tokenizer
from actors.prompts import open_prompts
from actors.rendering.renderer import ChatRenderer
from actors.rewards import make_reward
from actors.rewards.builtin import exact_match, numeric_answer
from actors.rewards.math_answer import math
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Episode, Prompt, Score
from streamrl.types import FinishReason

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "test.jsonl"


def episode(response: str, answer: str = "42") -> Episode:
    return Episode(Prompt("question", answer), response, len(response), FinishReason.STOP)


async def scores(reward: str, *responses: str, answer: str = "42", **kwargs: object) -> list[float]:
    data = DataSettings(source="addition", reward=reward, reward_kwargs=kwargs)
    return await rewards_of(data, [episode(r, answer) for r in responses])


async def rewards_of(data: DataSettings, episodes: list[Episode]) -> list[float]:
    return [Score.of(score).reward for score in await make_reward(data).score(episodes)]


async def test_exact_match():
    assert await scores("exact_match", "42", " 42\n", "42.", "4 2") == [1, 1, 0, 0]


async def test_exact_match_of_a_part():
    kwargs = {"pattern": "<answer>(.*?)</answer>", "ignore_case": True}
    given = ("<answer>PARIS</answer>", "Paris", "<answer>Paris</answer><answer>Rome</answer>")
    assert await scores("exact_match", *given, answer="Paris", **kwargs) == [1, 0, 0]


async def test_format_asks_for_each_element_once_in_order():
    right = ["<think>a</think><answer>b</answer>", " <think>a\nb</think>\n<answer>7</answer>\n"]
    wrong = [
        "<answer>b</answer><think>a</think>",
        "<think>a</think>x<answer>b</answer>",
        "<think> </think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think><think>a</think><answer>b</answer>",
    ]
    assert await scores("format", *right) == [1, 1]
    assert await scores("format", *wrong) == [0] * 5
    assert await scores("format", "<a>x</a>", tags=["a"]) == [1]


async def test_length_falls_beyond_its_limits():
    kwargs = {"max_tokens": 4, "min_tokens": 2}
    assert await scores("length", "a", "ab", "abcd", "abcde", **kwargs) == [0, 1, 1, 0]
    kwargs["decay_tokens"] = 4
    assert await scores("length", "a", "abcd", "abcde", "a" * 9, **kwargs) == [0.75, 1, 0.75, 0]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1),
        ("therefore $x = 2$", "2", 1),
        (r"\boxed{1+x}", "$x+1$", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{\frac{1}{3}}", "0.5", 0),
        ("nothing", "2", 0),
    ],
)
def test_math_is_equality_of_expressions(response, answer, reward):
    assert [score.reward for score in math([episode(response, answer)])] == [reward]


async def test_numeric_answer():
    right = ["42", "so it is 42.", "#### 42", "#### $42 of 50", "\\boxed{42}", "6*7 = 42.0"]
    assert await scores("numeric_answer", *right) == [1] * len(right)
    assert await scores("numeric_answer", "", "none", "41", "42 or 43") == [0] * 4
    assert await scores("numeric_answer", "41.9", tolerance=0.2) == [1]


@pytest.mark.parametrize(
    ("reward", "answer", "needed"),
    [
        ("exact_match", "", "was ''; exact_match needs one that is not empty"),
        ("exact_match", " ", "was ' '; exact_match needs one"),
        ("numeric_answer", "yes", "was 'yes'; numeric_answer needs a number in it"),
        ("math", " ", "was ' '; math needs an expression"),
        ("math", None, "was None; math needs an expression"),
        ("math", [], r"was \[\]; math needs an expression"),
        # Of Search-R1.
        (
            "math",
            {"target": ["7"]},
            r"was {'target': \['7'\]}; math needs an expression, or a list",
        ),
    ],
)
def test_a_row_without_what_is_compared_with_fails_its_group(reward, answer, needed):
    row = {"reward_model": {"ground_truth": answer}} if reward == "math" else {}
    prompt = Prompt("question", "" if answer is None else str(answer), row, "row 3 of a.jsonl")
    empty = Episode(prompt, "", 0, FinishReason.STOP)
    functions = {"exact_match": exact_match, "numeric_answer": numeric_answer}
    functions["math"] = lambda episode: math([episode])
    with pytest.raises(RolloutError, match=rf"row 3 of a\.jsonl: the answer {needed}"):
        functions[reward](empty)


@pytest.mark.parametrize(
    ("reward", "kwargs"), [("regex", {"pattern": ""}), ("format", {"tags": []})]
)
def test_a_rule_that_an_empty_response_keeps_is_refused(reward, kwargs):
    with pytest.raises(ConfigError, match=r"reward_kwargs\.\w+: was .*every empty response"):
        make_reward(DataSettings(source="addition", reward=reward, reward_kwargs=kwargs))


async def test_regex_judges_the_whole_response():
    pattern = "<think>.*</think>.+"
    assert await scores("regex", "<think>a\nb</think>c", "x<think></think>y", pattern=pattern) == [
        1,
        0,
    ]


async def test_gsm8k_loads_renders_and_scores_its_own_answers(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}")
    data = DataSettings(
        source=str(GSM8K),
        prompt_key="question",
        reward="numeric_answer",
        chat_template=template,
        shuffle=False,
    )
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    characters = "".join(sorted({c for row in rows for c in row["question"]} | set("QA:\n ")))
    renderer = ChatRenderer(make_tokenizer(characters), data)
    prompts = open_prompts(data, seed=0)
    questions = [prompts[i] for i in range(len(rows))]
    assert all(
        renderer.decode(renderer.encode(p)) == f"Q: {row['question']}\nA:"
        for p, row in zip(questions, rows, strict=True)
    )
    reference = [Episode(p, p.answer, 1, FinishReason.STOP) for p in questions]
    rewards = await rewards_of(data, reference)
    assert (len(rewards), set(rewards)) == (1319, {1.0})
    assert set(await rewards_of(data, [episode("#### 0.123", p.answer) for p in questions])) == {
        0.0
    }


def write_rewards(tmp_path: Path, text: str) -> str:
    (tmp_path / "rewards.py").write_text(text)
    return f"{tmp_path}/rewards.py:score"


@pytest.mark.parametrize(
    "text",
    [
        "def score(episode, bonus=0):\n    return len(episode.response) + bonus",
        "async def score(episode, bonus=0):\n    return len(episode.response) + bonus",
        "def score(episodes, bonus=0):\n    return [len(e.response) + bonus for e in episodes]",
        "import beside\ndef score(episode, bonus=0):\n    return beside.length(episode) + bonus",
    ],
)
async def test_a_users_function_scores_one_episode_or_the_group(tmp_path, text):
    (tmp_path / "beside.py").write_text("def length(episode):\n    return len(episode.response)")
    entry = write_rewards(tmp_path, text)
    assert await scores(entry, "a", "bcd", bonus=1) == [2, 4]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def score(episode):\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        (
            "x = 1\ndef score(episode):\n    return [][x]",
            r"list index out of range \(rewards\.py:3\)",
        ),
        ("def score(episode):\n    return 'much'", "returned 'much': it must return one finite"),
        (
            "def score(episode):\n    return float('nan')",
            r"score \(rewards\.py:1\) returned nan: it",
        ),
        ("def score(episode):\n    return [1.0, 2.0]", r"returned \[1\.0, 2\.0\]: it must"),
        ("def score(episode):\n    return '1'", "returned '1': it must return one finite number"),
        ("def score(episode):\n    pass", "returned None: it must return one finite number$"),
        ("def score(episodes):\n    return [1.0]", r"returned \[1\.0\]: it must return 2 finite"),
        (
            "def score(episodes):\n    return None",
            "None: .* 2 finite numbers, one for each episode",
        ),
    ],
)
async def test_a_reward_that_fails_costs_its_group_only(tmp_path, text, sentence):
    with pytest.raises(RolloutError, match=sentence):
        await scores(write_rewards(tmp_path, text), "a", "b")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def scores(episode):\n    return 1", "has no function 'score'; did you mean 'scores'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def score(:", "SyntaxError"),
    ],
)
async def test_a_users_file_that_cannot_be_used_is_named(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=f"rewards.py.*{sentence}"):
        await scores(write_rewards(tmp_path, text), "a")


@pytest.mark.parametrize(
    ("reward", "kwargs", "sentence"),
    [
        ("exact_macth", {}, "did you mean 'exact_match'"),
        ("regex", {}, "regex needs 'pattern'"),
        ("numeric_answer", {"tolerence": 1}, "did you mean 'tolerance'"),
        ("nowhere.py:score", {}, "there is no file nowhere.py"),
        ("rewards.py", {}, r"named PATH.py:NAME"),
    ],
)
async def test_a_wrong_name_is_refused(reward, kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        await scores(reward, "a", **kwargs)
