"""Several rewards: weights, data sources, and whose failure it was."""

from dataclasses import replace

import pytest

from actors.rewards import make_reward
from actors.rewards.forms import BoundFunction
from actors.rewards.weighted_sum import FunctionReward
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RewardError, RolloutError
from streamrl.interfaces import Prompt, Score
from tests.unit.rewards.episodes import episode


def data(*rewards: object, **settings: object) -> DataSettings:
    return DataSettings.model_validate({"source": "addition", "rewards": rewards, **settings})


async def test_the_reward_is_the_weighted_sum_and_each_value_is_recorded():
    settings = data(
        {"reward": "exact_match", "weight": 2},
        {"reward": "regex", "name": "form", "weight": 0.5, "kwargs": {"pattern": "[0-9]+"}},
        {"reward": "numeric_answer", "weight": 0},
    )
    right, digits, text = await make_reward(settings).score(map_episodes("42", "41", "= 42"))
    recorded = {"reward/exact_match": 1, "reward/form": 1, "reward/numeric_answer": 1}
    assert right == Score(2.5, recorded, extracted="42")
    assert (digits.reward, text.reward, text.metrics["reward/numeric_answer"]) == (0.5, 0.0, 1.0)


async def test_what_was_extracted_is_what_the_first_reward_that_reads_something_has_read():
    settings = data(
        {"reward": "length", "kwargs": {"max_tokens": 9}},
        {"reward": "exact_match", "kwargs": {"pattern": "is (.*)"}},
        {"reward": "numeric_answer"},
    )
    named, unnamed = await make_reward(settings).score(map_episodes("it is 1.50", "1.50"))
    assert (named.extracted, unnamed.extracted) == ("1.50", "")
    (whole,) = await make_reward(data({"reward": "exact_match"})).score(map_episodes("42"))
    assert whole.extracted is None


OWN = """
def mine(episode):
    return {"score": 1.0, "length": 2, "extracted": episode.response + "\\ud800"}
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_a_reward_of_ones_own_says_what_it_has_read(tmp_path, isolation):
    (tmp_path / "mine.py").write_text(OWN)
    settings = data({"reward": f"{tmp_path}/mine.py:mine", "isolation": isolation})
    (score,) = await make_reward(settings).score(map_episodes("a" * 300))
    assert score.metrics == {"reward/mine": 1.0, "reward/mine/length": 2.0}
    assert score.extracted == f"{'a' * 96} [...] {'a' * 95}?"


async def test_a_sum_that_is_not_finite_costs_its_group(tmp_path):
    (tmp_path / "mine.py").write_text("def huge(episode):\n    return 1e308\n")
    settings = data({"reward": f"{tmp_path}/mine.py:huge", "weight": 10})
    with pytest.raises(
        RewardError, match=r"^the reward 10 \* 1e\+308 of huge is inf; it must be fin"
    ):
        await make_reward(settings).score(map_episodes("a"))


def map_episodes(*responses: str, **row: object) -> list:
    return [episode(response, **row) for response in responses]


async def test_rewards_score_the_rows_of_their_data_sources():
    settings = data(
        {"reward": "exact_match", "data_source": ["words"]},
        {"reward": "numeric_answer", "data_source": ["gsm8k", "math"]},
        data_source_key="origin",
    )
    reward = make_reward(settings)
    (score,) = await reward.score(map_episodes("= 42", origin="math"))
    assert score == Score(1.0, {"reward/numeric_answer": 1.0}, extracted="42")
    (score,) = await reward.score(map_episodes("= 42", origin="words"))
    assert score == Score(0.0, {"reward/exact_match": 0.0})
    with pytest.raises(
        RolloutError, match="none of exact_match, numeric_answer has the origin 'x'"
    ):
        await reward.score(map_episodes("42", origin="x"))


@pytest.mark.parametrize("name", ["exact_match", "numeric_answer"])
async def test_a_reward_that_is_scored_at_once_names_itself_too(name):
    """A row without an answer: what cannot be scored is counted under the reward's name."""
    unanswered = episode("42", answer="")
    unanswered = replace(unanswered, prompt=Prompt("question", None))
    with pytest.raises(RewardError) as caught:
        await make_reward(data({"reward": name})).score([unanswered])
    assert caught.value.reward == name


async def test_what_cannot_be_scored_at_once_is_scored_by_a_call():
    def endless(episode):
        raise RecursionError

    def half(episode):
        return 0.5

    bound = BoundFunction(half, {}, "mine", "data_source")
    (score,) = await FunctionReward(bound, at_once=endless).score([episode("42")])
    assert score.reward == 0.5


async def test_an_error_names_its_reward_and_cancels_the_others(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio\nis_canceled = False\n"
        "def broken(episode):\n    raise KeyError('label')\n"
        "async def endless(episodes):\n    global is_canceled\n    try:\n"
        "        await asyncio.Event().wait()\n    finally:\n        is_canceled = True\n"
        "def canceled(episode):\n    return is_canceled\n"
    )
    own = f"{tmp_path}/mine.py"
    settings = data(f"{own}:endless", {"reward": f"{own}:broken", "name": "labels"})
    with pytest.raises(
        RewardError, match=r"reward labels \(.*mine.py:broken\): KeyError"
    ) as caught:
        await make_reward(settings).score(map_episodes("a", "b"))
    assert caught.value.reward == "labels"
    (score,) = await make_reward(data(f"{own}:canceled")).score(map_episodes("a"))
    assert score.reward == 1.0


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        (["exact_match", "exact_match"], "two rewards are called 'exact_match'"),
        ([{"reward": "a.py:mean"}], "reward/mean is another metric"),
        ([{"reward": "regex", "name": "a b"}], "pattern"),
    ],
)
def test_names_of_rewards_are_their_own(rewards, sentence):
    with pytest.raises(ValueError, match=sentence):
        data(*rewards)


def test_one_reward_beside_several_is_refused():
    with pytest.raises(ValueError, match=r"reward: has no effect beside data\.rewards"):
        data("exact_match", reward="regex")


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("exact_macth", r"data\.rewards\[0\]\.reward: was 'exact_macth'; .*'exact_match'"),
        ({"reward": "regex"}, r"data\.rewards\[0\]\.kwargs: regex needs 'pattern'"),
    ],
)
def test_a_refusal_names_the_entry(reward, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_reward(data(reward))
