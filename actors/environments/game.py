"""An episode of a game: the policy reads a state, answers with an action, and reads what follows.

Invariant: a game is a function of its seed, which the siblings of a group share, and of the answers
so far, so that it is restored by playing it again, and every answer is a turn, also one that names
no action. A game that raises costs its group (RolloutError).
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from actors.concurrency import Threads
from actors.rewards.answers import answer_part
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext, Observation, Renderer, Transition
from streamrl.types import Completion
from streamrl.user_code import attributed_to

T = TypeVar("T")
SEED = "seed"
"""The column of a prompt's row that chooses the level; without it the group's seed does."""


@dataclass(frozen=True)
class Outcome:
    """What an answer led to."""

    text: str
    """What the policy reads next."""
    reward: float = 0.0
    done: bool = False
    is_valid: bool = True
    """Whether the answer named an action that is allowed."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Game(Protocol):
    """One episode's; its methods may block, and are called in a thread."""

    @property
    def instructions(self) -> str:
        """The rules, and how an answer names an action."""
        ...

    def reset(self, seed: int) -> str:
        """Begin the level of the seed; what the policy reads first."""
        ...

    def step(self, answer: str) -> Outcome:
        """What the answer leads to."""
        ...

    def close(self) -> None:
        """Called once, also after an error."""
        ...


class GameEnvironment:
    """The conversation about a game.

    Args:
        instructions: in front of the first state; None: those of the game, "": none.
        max_moves: answers, those that name no action included; 0: no limit but the game's own.
    """

    def __init__(self, game: Game, *, instructions: str | None, max_moves: int) -> None:
        if max_moves < 0:
            raise ValueError(f"max_moves was {max_moves}; it must be 0 or more")
        self._game = game
        self._name = type(game).__name__
        # Its own: a game that hangs costs its episode, and not what else waits for a thread.
        self._threads = Threads(self._name)
        self._instructions = game.instructions if instructions is None else instructions
        self._max_moves = max_moves
        self._answers: list[str] = []
        self._states = hashlib.sha256()
        self._renderer: Renderer | None = None

    async def start(self, context: EnvironmentContext) -> Observation:
        self._renderer = context.renderer
        with attributed_to(self._name, RolloutError):
            seed = int(context.prompt.row.get(SEED, context.seed))
        state = await self._call(partial(self._game.reset, seed))
        self._states.update(state.encode(errors="replace"))
        opening = f"{self._instructions}\n\n{state}" if self._instructions else state
        return said(context.renderer, opening)

    async def step(self, completion: Completion) -> Transition:
        renderer = self._renderer
        assert renderer is not None, "start comes before step"
        turn = renderer.prefill + renderer.decode(completion.token_ids.tolist())
        answer = answer_part(turn).strip()
        outcome = await self._play(answer)
        is_last = outcome.done or len(self._answers) == self._max_moves
        text = outcome.text
        if self._instructions and not outcome.is_valid:
            text = f"Your answer names no action that is allowed.\n\n{text}"
        return Transition(
            observation=Observation() if is_last else said(renderer, text),
            done=is_last,
            reward=outcome.reward,
            is_valid=outcome.is_valid,
            metrics={**outcome.metrics, "num_moves": float(len(self._answers))},
        )

    async def snapshot(self) -> Any:
        """The answers so far, of which, and of the seed, the game is a function."""
        return {"answers": self._answers, "states": self._states.hexdigest()}

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Plays the game again. Raise RolloutError if it goes otherwise: it is no function of its
        seed."""
        await self.start(context)
        for answer in snapshot["answers"]:
            await self._play(answer)
        if self._states.hexdigest() != snapshot["states"]:
            raise RolloutError("the game went otherwise when its answers were played again")

    async def _play(self, answer: str) -> Outcome:
        outcome = await self._call(partial(self._game.step, answer))
        self._answers.append(answer)
        self._states.update(outcome.text.encode(errors="replace"))
        return outcome

    async def close(self) -> None:
        await self._call(self._game.close)

    async def _call(self, method: Callable[[], T]) -> T:
        """Waits for the game."""

        def called() -> T:
            with attributed_to(self._name, RolloutError):
                return method()

        return await self._threads.run(called)


def said(renderer: Renderer, text: str) -> Observation:
    """A user's message; without a chat template a line of its own."""
    if renderer.has_chat_template:
        return Observation(messages=({"role": "user", "content": text},))
    return Observation(token_ids=renderer.encode_text(f"{text}\n"))


def find_action(answer: str, names: Sequence[str]) -> int | None:
    """The place of the action that the answer names last; None: it names none.

    >>> find_action("Not up, but Left.", ["left", "up"])
    0
    """
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in longest_first)
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", answer, re.IGNORECASE)
    places = {name.lower(): i for i, name in enumerate(names)}
    return places[found[-1].lower()] if found else None
