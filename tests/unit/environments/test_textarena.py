"""Games of the textarena package, played to their end."""

import random
from typing import Any

import pytest

from actors.environments import make_environment
from tests.unit.environments.test_games import Played, entry

# Three disks: seven moves are enough.
HANOI = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")


def make_game(name: str) -> Any:
    """Imports the package for who plays, and not wherever tests are collected: it takes seconds."""
    from actors.environments.textarena import TextArenaGame

    return TextArenaGame(name, {})


def hanoi() -> Any:
    game = make_game("TowerOfHanoi-v0")
    game.reset(1)
    return game


def test_a_game_that_is_won_pays_at_its_end_and_says_what_happened():
    game = hanoi()
    outcomes = [game.step(move) for move in HANOI]
    assert [outcome.done for outcome in outcomes] == [False] * 6 + [True]
    assert [outcome.reward for outcome in outcomes] == [0.0] * 6 + [1.0]
    assert outcomes[-1].metrics == {"return": 1.0}
    assert all(outcome.is_valid for outcome in outcomes)
    assert "Tower" in outcomes[0].text or "A:" in outcomes[0].text
    assert HANOI[0] not in outcomes[0].text


def test_a_move_that_is_none_is_not_valid_and_the_game_goes_on():
    game = hanoi()
    outcome = game.step("A to C, please")
    assert (outcome.is_valid, outcome.done, outcome.reward) == (False, False, 0.0)
    assert "invalid move" in outcome.text
    assert game.step(HANOI[0]).is_valid


def test_the_seed_of_a_group_decides_the_game_and_other_chance_is_left_alone():
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    drawn = []
    boards = []
    for seed in (7, 7, 8):
        boards.append(make_game("Sudoku-v0").reset(seed))
        drawn.append(random.random())
    assert boards[0] == boards[1] != boards[2]
    assert drawn == expected


async def test_the_policy_reads_what_the_game_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "tests.unit.environments.test_games.ALPHABET", "".join(map(chr, range(32, 127))) + "\n"
    )
    played = Played(make_environment(entry("textarena:TowerOfHanoi-v0")))
    assert "Tower of Hanoi with 3 disks" in await played.start(1)
    said = [await played.answer(f"<think>not [C B]</think>\n{move}") for move in HANOI]
    assert [transition.done for _, transition in said] == [False] * 6 + [True]
    assert sum(transition.reward for _, transition in said) == 1.0


def test_a_name_that_is_nearly_a_game_is_named():
    with pytest.raises(ValueError, match="there is no 'Mastermind'; did you mean 'Mastermind-v0'"):
        make_game("Mastermind")
