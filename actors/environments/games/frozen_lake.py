"""FrozenLake: find the way over the ice to the goal without falling into a hole (extra: gym).

The map is drawn from the seed, and always has a way.
"""

from collections.abc import Sequence
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from actors.environments.games.game import GameEnvironment
from actors.environments.games.gymnasium import GymnasiumGame

ACTIONS = ("left", "down", "right", "up")
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
    actions: Sequence[str] = ACTIONS,
    separator: str = " ",
    instructions: str | None = None,
    max_moves: int = 20,
) -> GameEnvironment:
    game = FrozenLakeGame(
        size=size,
        frozen=frozen,
        is_slippery=is_slippery,
        actions=actions,
        separator=separator,
    )
    return GameEnvironment(game, instructions=instructions, max_moves=max_moves)
