"""Sokoban: push every box onto a target; boxes cannot be pulled.

A room is drawn from the seed and played backwards from its solution, so it can always be solved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.environments.games.game import GameEnvironment, Outcome, find_action

ACTIONS = ("up", "down", "left", "right")
_STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
_RULES = (
    "You push boxes in a room. P is you (S on a target), X is a box (V on a target), O is a "
    "target, # is a wall, _ is floor. Push every box onto a target; a box cannot be pulled, and "
    "not be pushed against a wall or another box."
)
_MAX_ROOMS = 1000
Cell = tuple[int, int]


@dataclass(frozen=True)
class Level:
    """Where everything stands."""

    size: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def num_solved(self) -> int:
        return len(self.boxes & self.targets)

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    def pushed(self, action: int) -> "Level":
        """After a step; the same one where a wall or a second box is in the way."""
        ahead, behind = _moved(self.player, action), _moved(_moved(self.player, action), action)
        if ahead in self.walls:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        if behind in self.walls | self.boxes:
            return self
        return replace(self, player=ahead, boxes=self.boxes - {ahead} | {behind})

    def pulled(self, action: int) -> "Level":
        """After a step backwards that takes along the box behind the player, if there is one."""
        ahead, behind = _moved(self.player, action), _moved(self.player, action ^ 1)
        if ahead in self.walls | self.boxes:
            return self
        boxes = self.boxes - {behind} | {self.player} if behind in self.boxes else self.boxes
        return replace(self, player=ahead, boxes=boxes)

    def text(self, separator: str) -> str:
        rows = range(self.size)
        return "\n".join(separator.join(self._cell((i, j)) for j in rows) for i in rows)

    def _cell(self, cell: Cell) -> str:
        if cell in self.walls:
            return "#"
        is_target = cell in self.targets
        if cell == self.player:
            return "S" if is_target else "P"
        if cell in self.boxes:
            return "V" if is_target else "X"
        return "O" if is_target else "_"


def draw_level(seed: int, *, size: int, num_boxes: int, num_steps: int) -> Level:
    """A room that can be solved, with no box on a target.

    Raises:
        ValueError: none was found; the room is too small for so many boxes.
    """
    for solution in _solutions(np.random.default_rng(seed), size, num_boxes):
        room, rng = solution
        for action in rng.integers(0, len(ACTIONS), num_steps):
            room = room.pulled(int(action))
        if not room.num_solved:
            return room
    raise ValueError(
        f"no room of size {size} with num_boxes {num_boxes} and num_steps {num_steps} was found; "
        "set a larger size or num_steps, or fewer boxes"
    )


def _solutions(
    rng: np.random.Generator, size: int, num_boxes: int
) -> Iterator[tuple[Level, np.random.Generator]]:
    """Solved rooms, each with walls, targets and a player of its own."""
    border = {(i, j) for i in range(size) for j in range(size) if {i, j} & {0, size - 1}}
    inside = [(i, j) for i in range(1, size - 1) for j in range(1, size - 1)]
    num_walls = len(inside) // 10
    for _ in range(_MAX_ROOMS):
        cells = [inside[int(i)] for i in rng.permutation(len(inside))]
        targets = frozenset(cells[:num_boxes])
        walls = frozenset(border | set(cells[num_boxes + 1 :][:num_walls]))
        yield Level(size, walls, targets, targets, cells[num_boxes]), rng


def _moved(cell: Cell, action: int) -> Cell:
    down, right = _STEPS[action]
    return cell[0] + down, cell[1] + right


class SokobanGame:
    """The game in one room.

    Args:
        size: rows and columns, walls included.
        num_steps: of the walk backwards from the solution; more make harder rooms.
        separator: between the cells of a row.
    """

    def __init__(
        self, *, size: int, num_boxes: int, num_steps: int, actions: Sequence[str], separator: str
    ) -> None:
        if len(actions) != len(ACTIONS):
            raise ValueError(f"actions: was {list(actions)}; names for {', '.join(ACTIONS)}")
        if num_boxes < 1 or (size - 2) ** 2 < num_boxes + 2:
            raise ValueError(
                f"size {size} is too small for num_boxes {num_boxes}, or there is none"
            )
        self._size, self._num_boxes, self._num_steps = size, num_boxes, num_steps
        self._names, self._separator = tuple(actions), separator
        self._room = self._draw(0)

    @property
    def instructions(self) -> str:
        return f"{_RULES} Answer with one of: {', '.join(self._names)}."

    def reset(self, seed: int) -> str:
        self._room = self._draw(seed)
        return self._room.text(self._separator)

    def step(self, answer: str) -> Outcome:
        action, before = find_action(answer, self._names), self._room
        if action is None:
            return Outcome(before.text(self._separator), is_valid=False)
        self._room = room = before.pushed(action)
        return Outcome(
            room.text(self._separator),
            reward=(room.num_solved - before.num_solved) / self._num_boxes,
            done=room.is_solved,
            metrics={"success": float(room.is_solved)},
        )

    def close(self) -> None:
        """There is nothing to close."""

    def _draw(self, seed: int) -> Level:
        return draw_level(
            seed, size=self._size, num_boxes=self._num_boxes, num_steps=self._num_steps
        )


def sokoban(
    *,
    size: int = 6,
    num_boxes: int = 1,
    num_steps: int = 30,
    actions: Sequence[str] = ACTIONS,
    separator: str = " ",
    instructions: str | None = None,
    max_moves: int = 30,
) -> GameEnvironment:
    game = SokobanGame(
        size=size,
        num_boxes=num_boxes,
        num_steps=num_steps,
        actions=actions,
        separator=separator,
    )
    return GameEnvironment(game, instructions=instructions, max_moves=max_moves)
