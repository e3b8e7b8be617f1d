"""Games of one player of the textarena package (extra: textarena), such as `textarena:Bandit-v0`.

What the game says to the player is the policy's next message, and the whole answer is its action.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from actors.environments.game import GameEnvironment, Outcome
from streamrl.errors import did_you_mean
from streamrl.user_code import attributed_to

_RANDOM = threading.Lock()


class TextArenaGame:
    """A game that one player plays. Raise ValueError if there is no such game."""

    instructions = ""

    def __init__(self, env_id: str, kwargs: dict[str, Any]) -> None:
        if env_id not in ENV_REGISTRY:
            raise ValueError(f"there is no {env_id!r}; {did_you_mean(env_id, ENV_REGISTRY)}")
        # With its wrappers each observation would repeat the whole game.
        plain_id = f"{env_id}-raw"
        self._id = plain_id if plain_id in ENV_REGISTRY else env_id
        with attributed_to(f"environment textarena:{env_id}"):
            self._env = textarena.make(self._id, **kwargs)
        self._seed, self._num_moves = 0, 0

    def reset(self, seed: int) -> str:
        self._seed, self._num_moves = seed, 0
        with _seeded(seed):
            self._env.reset(num_players=1, seed=seed)
        return self._said()

    def step(self, answer: str) -> Outcome:
        self._num_moves += 1
        with _seeded(f"{self._seed} {self._num_moves}"):
            done, _ = self._env.step(answer)
        state = self._env.state
        is_valid = not (state.error_count or state.game_info[0]["invalid_move"])
        reward = float((state.rewards or {}).get(0, 0.0)) if done else 0.0
        metrics = {"return": reward} if done else {}
        return Outcome(self._said(), reward, bool(done), is_valid, metrics)

    def close(self) -> None:
        """There is nothing to close."""

    def _said(self) -> str:
        """What the game has said since; the policy knows its own answers."""
        _, observation = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in observation if kind is not own)


@contextmanager
def _seeded(seed: int | str) -> Iterator[None]:
    """textarena draws from the process's generator, which has to go on as before."""
    with _RANDOM:
        state = random.getstate()
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def textarena_game(
    env_id: str, *, instructions: str = "", max_moves: int = 0, **kwargs: Any
) -> GameEnvironment:
    """`textarena:ID`; what else is given is for the game itself."""
    game = TextArenaGame(env_id, kwargs)
    return GameEnvironment(game, instructions=instructions, max_moves=max_moves)
