"""`streamrl check --deep` samples and scores one group, and shows what is wrong with whose code."""

from pathlib import Path

import pytest

from streamrl.cli.main import main
from tests.settings import set_options
from tests.system.conftest import CONFIG

REWARD = """
def score(episode):
    return float(len(episode.response)) / digits(episode)


def digits(episode):
    return {divisor}
"""
ENVIRONMENT = """
class Guess:
    def __init__(self):
        self.turns = 0

    async def start(self, context):
        from streamrl.interfaces import Observation

        self.again = Observation(token_ids=context.renderer.encode_text("c"))
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion):
        from streamrl.interfaces import Transition

        self.turns += 1
        {first}
        return Transition(observation=self.again, done=self.turns == 2)
"""


@pytest.fixture
def deep(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], torch_is_known: None):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))

    def check(*overrides: str) -> tuple[int, str, str]:
        words = set_options(*overrides)
        code = main(["check", "--deep", str(config), *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return check


def sampled(out: str) -> str:
    """What is printed below the findings."""
    _, found, text = out.partition("prompt, ")
    return found + text


def write(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_group_is_shown_with_its_rewards_and_reasons(deep, tmp_path):
    code, out, _ = deep("generator.max_new_tokens=1", "generator.ignore_eos=true")
    assert code == 0
    lines = sampled(out).splitlines()
    assert lines[0].startswith("prompt, ")
    assert lines[1].strip().startswith("c")
    answer = lines[lines.index("answer") + 1].strip()
    assert lines[1].strip() == f"c{answer}="
    assert sum(line.startswith("response ") for line in lines) == 4
    assert "response 1, reward 0, length, 1 tokens" in lines
    assert "mean reward 0 of 4 responses" in lines
    assert any(line.startswith("all rewards of this group are equal") for line in lines)
    assert any(line.startswith("4 of 4 responses were cut") for line in lines)
    assert not (tmp_path / "run").exists()


def test_an_episode_of_several_turns_is_shown_whole(deep, tmp_path):
    own = write(tmp_path, "guess.py", ENVIRONMENT.format(first="pass"))
    code, out, _ = deep(
        f"generator.environment={own}:Guess",
        "generator.max_new_tokens=2",
        "generator.ignore_eos=true",
        "generator.max_model_len=32",
    )
    assert code == 0
    assert "4 tokens, 2 turns" in out


def test_a_reward_that_fails_is_shown_below_the_responses_with_its_line(deep, tmp_path):
    own = write(tmp_path, "zero.py", REWARD.format(divisor="1 / 0"))
    code, out, err = deep(f"data.reward={own}:score")
    assert code != 0
    assert sum(line.startswith("response ") for line in out.splitlines()) == 4
    assert f'File "{own}", line 3, in score' in err
    assert f'File "{own}", line 7, in digits' in err
    assert "actors/" not in err
    assert f"streamrl check: reward {own}:score: ZeroDivisionError: division by zero" in err


@pytest.mark.parametrize("answer", ["float('nan')", "None", "'much'"])
def test_a_reward_that_is_no_number_is_shown(deep, tmp_path, answer):
    own = write(
        tmp_path, "odd.py", f"def score(episodes):\n    return [{answer}] * len(episodes)\n"
    )
    code, out, err = deep(f"data.reward={own}:score")
    assert code != 0
    assert "response 4" in out
    assert f"streamrl check: reward {own}:score (odd.py:1) returned [" in err
    assert "it must return 4 finite numbers, one for each episode" in err


def test_an_environment_that_fails_is_shown_with_its_line(deep, tmp_path):
    own = write(tmp_path, "fails.py", ENVIRONMENT.format(first="self.missing"))
    code, out, err = deep(f"generator.environment={own}:Guess")
    assert code != 0
    assert sampled(out)
    assert f'File "{own}", line 16, in step' in err
    assert "AttributeError" in err


def test_what_cannot_start_is_refused_before_anything_is_sampled(deep):
    code, out, err = deep("data.reward=nowhere.py:score")
    assert (code, sampled(out)) == (2, "")
    assert "data.reward: there is no file nowhere.py" in err


@pytest.fixture
def chat(tmp_path: Path) -> str:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return f"data.chat_template={write(tmp_path, 'chat.jinja', text)}"


def test_agents_are_not_sampled(deep, chat):
    code, out, err = deep("generator.environment=agent", chat)
    assert code == 2
    assert "generator.environment: is agent, and --deep samples no episodes of agents" in err
    assert not sampled(out)


def test_a_group_is_one_that_no_agent_plays(deep, chat):
    mixed = "[{name: a, environment: agent, weight: 9}, {name: b, environment: single_turn}]"
    code, out, _ = deep(f"environments={mixed}", chat)
    assert code == 0
    assert "response 4" in out
