"""Any Gymnasium environment that is played in text (extra: gym), and FrozenLake: find the way over
the ice to the goal without falling into a hole.

The state is what it renders with render mode `ansi`, or its observation where that is text. The
actions are those of a `Discrete` space, by name or number, or the whole answer for a `Text` space.
FrozenLake's map is drawn from the seed, and always has a way.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from gymnasium.spaces import Discrete, Text

from actors.environments.game import GameEnvironment, Outcome, find_action
from streamrl.user_code import attributed_to

_HIGHLIGHTED = re.compile(r"\x1b\[\d+m(.)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class GymnasiumGame:
    """A game around a Gymnasium environment.

    Args:
        actions: names of a discrete space's actions in their order; empty: their numbers.
        rules: in front of what says how to answer.

    Raises:
        ValueError: its actions or its states are not text, or `actions` are not as many as it has.
    """

    def __init__(
        self, env: "gymnasium.Env[Any, Any]", *, actions: Sequence[str] = (), rules: str = ""
    ) -> None:
        self.env = env
        self._names = _names(env, actions)
        self._rules = rules
        self._mask: Any = None
        self._last = ""
        self._return = 0.0
        if not isinstance(env.observation_space, Text) and env.render_mode != "ansi":
            raise ValueError("it renders no text (render mode ansi), and its states are not text")

    @property
    def instructions(self) -> str:
        how = f"Answer with one of: {', '.join(self._names)}." if self._names else ""
        return " ".join(part for part in (self._rules, how) if part)

    def reset(self, seed: int) -> str:
        state, info = self.env.reset(seed=seed)
        self._mask = info.get("action_mask")
        return self.text(state)

    def step(self, answer: str) -> Outcome:
        action = self._action(answer)
        if action is None:
            return Outcome(self.text(None), is_valid=False)
        state, reward, terminated, truncated, info = self.env.step(action)
        self._mask = info.get("action_mask")
        self._return += float(reward)
        return Outcome(
            self.text(state),
            reward=float(reward),
            done=terminated or truncated,
            metrics={"return": self._return, **self.metrics(info)},
        )

    def close(self) -> None:
        self.env.close()

    def text(self, state: Any) -> str:
        """The state as the policy reads it: what is rendered, or the observation itself."""
        if isinstance(self.env.observation_space, Text):
            self._last = self._last if state is None else str(state)
            return self._last
        return plain(str(self.env.render()))

    def metrics(self, info: dict[str, Any]) -> dict[str, float]:
        """What else is recorded of the episode."""
        return {}

    def _action(self, answer: str) -> Any:
        """What the environment is given; None if the answer names nothing that it allows."""
        space = self.env.action_space
        if isinstance(space, Text):
            return answer if space.contains(answer) else None
        number = find_action(answer, self._names)
        if number is None or (self._mask is not None and not self._mask[number]):
            return None
        return int(space.start) + number if isinstance(space, Discrete) else None


def gymnasium_text(
    env_id: str,
    *,
    actions: Sequence[str] = (),
    rules: str = "",
    instructions: str | None = None,
    max_moves: int = 0,
    **kwargs: Any,
) -> GameEnvironment:
    """`gymnasium:ID`, or `gymnasium:MODULE:ID` where a module that registers it is imported first,
    from the working folder, too; what else is given is for the environment itself.

    Raises:
        ConfigError: Gymnasium cannot make it.
        ValueError: it is not played in text.
    """
    with attributed_to(f"environment gymnasium:{env_id}"):
        module, _, name = env_id.rpartition(":")
        if module:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            importlib.import_module(module)
        creator: Any = gymnasium.spec(name).entry_point
        if isinstance(creator, str):
            creator = load_env_creator(creator)
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        shown: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
        env = gymnasium.make(name, disable_env_checker=True, **shown, **kwargs)
    game = GymnasiumGame(env, actions=actions, rules=rules)
    return GameEnvironment(game, instructions=instructions, max_moves=max_moves)


def plain(text: str) -> str:
    """Without terminal colors; a character that is highlighted stands in brackets.

    >>> plain("S\\x1b[41mF\\x1b[0mG")
    'S[F]G'
    """
    return _ESCAPE.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip()


def _names(env: "gymnasium.Env[Any, Any]", actions: Sequence[str]) -> tuple[str, ...]:
    space = env.action_space
    if isinstance(space, Text):
        if actions:
            raise ValueError("actions: its action is any text, so they have no names")
        return ()
    if not isinstance(space, Discrete):
        raise ValueError(f"its actions are {space}; a Discrete or a Text space is played in text")
    if actions and len(actions) != space.n:
        raise ValueError(f"actions: {len(actions)} names were given for {space.n} actions")
    return tuple(actions) or tuple(str(int(space.start) + i) for i in range(int(space.n)))


LAKE_ACTIONS = ("left", "down", "right", "up")
_RULES = (
    "You stand on a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Walk to the goal "
    "without falling into a hole."
)
_CELLS = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}


class FrozenLakeGame(GymnasiumGame):
    """Gymnasium's FrozenLake on a map of each seed's own.

    Args:
        size: rows and columns.
        frozen: the chance that a cell is ice.
        separator: between the cells of a row.
    """

    def __init__(
        self, *, size: int, frozen: float, is_slippery: bool, actions: Sequence[str], separator: str
    ) -> None:
        if size < 2 or not 0 < frozen <= 1:
            raise ValueError(f"size {size} and frozen {frozen:g}: size >= 2 and 0 < frozen <= 1")
        self._size, self._frozen, self._is_slippery = size, frozen, is_slippery
        self._separator = separator
        super().__init__(self._lake(0), actions=actions, rules=_RULES)

    def reset(self, seed: int) -> str:
        self.env = self._lake(seed)
        return super().reset(seed)

    def text(self, state: Any) -> str:
        lake: Any = self.env.unwrapped
        rows = [[_CELLS[bytes(cell)] for cell in row] for row in lake.desc]
        row, column = divmod(int(lake.s), self._size)
        marked = {"O": "X", "G": "!"}.get(rows[row][column], "P")
        rows[row] = [*rows[row][:column], marked, *rows[row][column + 1 :]]
        return "\n".join(self._separator.join(cells) for cells in rows)

    def metrics(self, info: dict[str, Any]) -> dict[str, float]:
        return {"success": float(self._return > 0)}

    def _lake(self, seed: int) -> FrozenLakeEnv:
        desc = generate_random_map(self._size, self._frozen, seed)
        return FrozenLakeEnv(render_mode="ansi", desc=desc, is_slippery=self._is_slippery)


def frozen_lake(
    *,
    size: int = 4,
    frozen: float = 0.8,
    is_slippery: bool = False,
    actions: Sequence[str] = LAKE_ACTIONS,
    separator: str = " ",
    instructions: str | None = None,
    max_moves: int = 20,
) -> GameEnvironment:
    game = FrozenLakeGame(
        size=size, frozen=frozen, is_slippery=is_slippery, actions=actions, separator=separator
    )
    return GameEnvironment(game, instructions=instructions, max_moves=max_moves)
