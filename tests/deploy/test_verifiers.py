"""A taskset of the package verifiers, unchanged, plays through the gateway of a real run.

It is installed in a Python of its own. The taskset's game reads a word list of nltk's, which is
downloaded from elsewhere; a list of the same form is written here in its place.
"""

import json
from pathlib import Path

import pytest
import yaml

from streamrl.tracking.jsonl import read_metrics
from tests.deploy.conftest import kept_environment
from tests.system.conftest import CONFIG, Launched
from tests.system.test_agents import assert_exact

ROOT = Path(__file__).parents[2]
PACKAGES = ("verifiers==0.4.0", "textarena>=0.7.4,<0.8", "nltk>=3.9,<4", "uv")
WORDS = "able about after again air animal apple army art baby back bad ball band base basin bath"

# The policy reads the end of every message: of what the game says, that is the board.
TEMPLATE = "{% for m in messages %}{{ m.content[-24:] }}>{% endfor %}"

GUESSES = '''
"""Guesses of single letters in the form of the game: what the model is warm-started on."""

import numpy as np

from streamrl.interfaces import Prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Guesses:
    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, prompt_index):
        rng = np.random.default_rng([self.seed, prompt_index])
        board = "C00 C01 C02 left. Guessed letters: _ is in the word"
        start = int(rng.integers(len(board) - 24))
        return Prompt(board[start : start + 24] + ">", f"[{rng.choice(list(LETTERS))}]")
'''


@pytest.fixture(scope="module")
def python() -> Path:
    return kept_environment("verifiers", *PACKAGES) / "bin" / "python"


@pytest.fixture
def hangman(tmp_path: Path, python: Path) -> Path:
    """The configuration of a run whose episodes are games of the package's taskset."""
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(WORDS.split()))
    (tmp_path / "board.jinja").write_text(TEMPLATE)
    (tmp_path / "guesses.py").write_text(GUESSES)
    config = yaml.safe_load(CONFIG.format(folder=tmp_path, model=tmp_path / "model"))
    config["run"] |= {"max_steps": 2}
    config["model"]["recipe"] |= {
        "alphabet": "".join(chr(i) for i in range(32, 127)) + "\n",
        "warm_start_source": f"{tmp_path / 'guesses.py'}:Guesses",
        "warm_start_steps": 150,
        "warm_start_accuracy": 0.9,
    }
    config["data"] = {
        "source": "environment",
        "reward": "environment",
        "chat_template": str(tmp_path / "board.jinja"),
        "max_prompt_length": 64,
        "num_eval_prompts": 4,
    }
    play = ROOT / "configs" / "recipes" / "verifiers" / "play.py"
    agent = {"command": [str(python), str(play), "textarena", "{seed}"], "max_agents": 3}
    config["generator"] |= {
        "environment": "agent",
        "agent": agent,
        "count": 1,
        "group_size": 2,
        "max_num_seqs": 4,
        "max_model_len": 1024,
    }
    # A generator that the machine does not let run for some seconds loses no group.
    config["buffer"] |= {"max_staleness": 0, "lease_ttl_s": 60}
    config["learner"] |= {"groups_per_step": 2, "max_tokens_per_micro_batch": 4096}
    file = tmp_path / "hangman.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_taskset_of_the_package_trains_and_its_books_close(
    hangman: Path, python: Path, launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("TASKSET_KWARGS", json.dumps({"game": "Hangman-v0"}))
    monkeypatch.setenv("PATH", str(python.parent), prepend=":")
    run: Launched = launch(file=hangman)
    assert run.end() == 0, run.output
    assert len(run.lines) == 2
    assert_exact(run)
    samples = read_metrics(run.folder / "samples.jsonl")
    assert any(len(sample["messages"]) > 3 for sample in samples), samples
    assert max(line["reward/mean"] for line in run.lines) > 0
    assert not sum(run.books["dropped"].values()), run.log("generator-0")
