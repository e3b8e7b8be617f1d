"""FrozenLake and any other Gymnasium environment, turn by turn."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from actors.environments import make_environment
from actors.environments.game import GameEnvironment, Outcome, find_action
from actors.environments.gymnasium import LAKE_ACTIONS, plain
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import EnvironmentContext, Prompt, Transition
from streamrl.types import Completion, FinishReason

ALPHABET = "PXOG_! \nLDRUabcdefghijklmnopqrstuvwxyzY.,:ANW0123456789"


def entry(environment: str, **kwargs: object) -> EnvironmentEntry:
    sections = {
        "model": {"path": "unused"},
        "data": {"source": "environment"},
        "generator": {"environment": environment, "environment_kwargs": kwargs},
    }
    return RunConfig.model_validate(sections).entries[0]


def renderer() -> ChatRenderer:
    return ChatRenderer(make_tokenizer(ALPHABET), DataSettings(source="copy"))


class Played:
    """A game, turn by turn, as the policy reads it."""

    def __init__(self, environment: GameEnvironment) -> None:
        self.environment, self.renderer = environment, renderer()

    async def start(self, seed: object) -> str:
        prompt = Prompt("", "", {"seed": seed})
        observation = await self.environment.start(EnvironmentContext(prompt, (), self.renderer))
        return self.renderer.decode(observation.token_ids)

    async def answer(self, text: str) -> tuple[str, Transition]:
        ids = np.array(self.renderer.encode_text(text), np.int32)
        completion = Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )
        transition = await self.environment.step(completion)
        return self.renderer.decode(transition.observation.token_ids), transition


def lake(**kwargs: object) -> Played:
    settings = {"actions": list("LDRU"), "separator": "", "instructions": "", **kwargs}
    return Played(make_environment(entry("frozen_lake", **settings)))


async def test_frozen_lake_is_played_to_the_goal():
    played = lake()
    assert await played.start(5) == "PO__\n____\n_O__\n_OOG\n"
    for move, state in (("D", "_O__\nP___"), ("R", "_O__\n_P__"), ("R", "_O__\n__P_")):
        text, transition = await played.answer(move)
        assert text.startswith(state)
        assert (transition.done, transition.is_valid, transition.reward) == (False, True, 0.0)
    await played.answer("R")
    await played.answer("D")
    text, transition = await played.answer("D")
    assert (text, transition.done, transition.reward) == ("", True, 1.0)
    assert transition.metrics == {"return": 1.0, "success": 1.0, "num_moves": 6.0}


async def test_a_hole_ends_the_game_without_a_reward():
    played = lake()
    await played.start(5)
    _, transition = await played.answer("R")
    assert (transition.done, transition.reward) == (True, 0.0)
    assert transition.metrics["success"] == 0.0


async def test_an_answer_without_an_action_is_an_invalid_turn_and_moves_nothing():
    played = lake(max_moves=2)
    first = await played.start(5)
    text, transition = await played.answer("Y")
    assert (text, transition.is_valid, transition.done) == (first, False, False)
    text, transition = await played.answer("Y")
    assert (text, transition.is_valid, transition.done) == ("", False, True)


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        ("<think>left</think>hm", False),
        ("<think>or left", False),
        ("<think>up</think> left", True),
    ],
)
async def test_what_was_thought_names_no_action(monkeypatch, answer: str, is_valid: bool):
    monkeypatch.setattr(f"{__name__}.ALPHABET", ALPHABET + "<>/")
    played = lake(actions=["left", "down", "right", "up"])
    first = await played.start(5)
    text, transition = await played.answer(answer)
    assert (text, transition.is_valid) == (first, is_valid)


async def test_the_seed_of_the_row_chooses_the_map():
    first, again, other = [await lake().start(seed) for seed in (5, 5, 6)]
    assert first == again != other


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("left", 0),
        ("I go LEFT, then right", 2),
        ("not up, but down!", 1),
        ("leftover", None),
        ("", None),
    ],
)
def test_the_action_named_last_is_taken(answer, action):
    assert find_action(answer, LAKE_ACTIONS) == action


async def test_any_gymnasium_environment_with_text_is_played_by_named_actions():
    names = ["south", "north", "east", "west", "pick", "drop"]
    environment = entry("gymnasium:Taxi-v4", actions=names, instructions="")
    played = Played(make_environment(environment))
    played.renderer = ChatRenderer(
        make_tokenizer(ALPHABET + "+-|()[]BT" + "".join(map(chr, range(65, 91)))),
        DataSettings(source="copy"),
    )
    first = await played.start(3)
    _, transition = await played.answer("south")
    assert (transition.reward, transition.is_valid) == (-1.0, True)
    for illegal in ("drop", "fly"):
        _, transition = await played.answer(illegal)
        assert (transition.reward, transition.is_valid) == (0.0, False)
    assert "|" in first


def test_an_environment_of_a_module_in_the_working_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_taxi.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('OwnTaxi-v0', 'gymnasium.envs.toy_text.taxi:TaxiEnv')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert make_environment(entry("gymnasium:own_taxi:OwnTaxi-v0")) is not None
    with pytest.raises(ConfigError, match=r"environment gymnasium:no_module:OwnTaxi-v0: .*"):
        make_environment(entry("gymnasium:no_module:OwnTaxi-v0"))


@pytest.mark.parametrize(
    ("failing", "seed", "sentence"),
    [
        ("reset", 3, "Broken: IndexError: no such level"),
        ("step", 3, "Broken: IndexError: no such level"),
        ("close", 3, "Broken: IndexError: no such level"),
        ("", "three", "Broken: ValueError: .*'three'"),
    ],
)
async def test_a_game_that_fails_costs_its_group(failing: str, seed: object, sentence: str):
    class Broken:
        instructions = "go"

        def reset(self, seed: int) -> str:
            return self.unless("reset", "here")

        def step(self, answer: str) -> Outcome:
            return Outcome(self.unless("step", "there"))

        def close(self) -> None:
            self.unless("close", "")

        def unless(self, method: str, text: str) -> str:
            if method == failing:
                raise IndexError("no such level")
            return text

    async def play() -> None:
        played = Played(GameEnvironment(Broken(), instructions=None, max_moves=0))
        await played.start(seed)
        await played.answer("up")
        await played.environment.close()

    with pytest.raises(RolloutError, match=f"^{sentence}$"):
        await play()


async def test_a_game_that_hangs_holds_up_nothing_else(monkeypatch):
    monkeypatch.setattr("actors.concurrency.MAX_HUNG", 2)
    is_over = threading.Event()

    class Hanging:
        instructions = "go"

        def reset(self, seed: int) -> str:
            is_over.wait()
            return "here"

        def close(self) -> None: ...

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    try:
        for _ in range(3):
            hanging = Played(GameEnvironment(Hanging(), instructions=None, max_moves=0))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(hanging.start(3), 0.05)
            await hanging.environment.close()
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 120) == 7
    finally:
        is_over.set()


def test_terminal_colors_become_brackets():
    assert plain("S\x1b[41mF\x1b[0mG\n\x1b[1mx") == "S[F]G\nx"


@pytest.mark.parametrize(
    ("environment", "kwargs", "sentence"),
    [
        ("frozen_lake", {"sise": 3}, r"generator\.environment_kwargs: .*mean 'size'"),
        ("frozen_lake", {"size": 1}, r"environment_kwargs: frozen_lake: size 1"),
        ("frozen_lake", {"actions": ["up"]}, "1 names were given for 4 actions"),
        ("frozen_lake", {"max_moves": -1}, "max_moves was -1"),
        ("sokoban", {}, "was 'sokoban', which is not built in any more; textarena:Sokoban-v0"),
        ("single_turn", {"x": 1}, "single_turn takes no 'x'; it takes none"),
        ("frozenlake", {}, "generator.environment: was 'frozenlake'; .*mean 'frozen_lake'"),
        ("gymnasium:CartPole-v1", {}, "it renders no text"),
        ("gymnasium:Pendulum-v1", {}, "its actions are Box"),
        ("gymnasium:Taksi-v3", {}, "environment gymnasium:Taksi-v3: .*"),
        ("gymnasium:", {}, "generator.environment: was 'gymnasium:'"),
    ],
)
def test_a_bad_environment_or_argument_is_refused(environment, kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_environment(entry(environment, **kwargs))
