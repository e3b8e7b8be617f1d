"""Unfinished games, each with a next move, for the model's warm start.

A move is a good one with probability `skill`, otherwise a random one. The model thus learns the
form of a game and to play it a little, which leaves reinforcement learning a reward to raise.
"""

import numpy as np

from actors.environments.gymnasium import FrozenLakeGame
from streamrl.interfaces import Prompt

MOVES = "LDRU"
END = "</s>"


class Moves:
    def __init__(self, seed, size=4, skill=0.5, max_moves=8):
        self.seed, self.size, self.skill, self.max_moves = seed, size, skill, max_moves

    def __getitem__(self, prompt_index):
        """Return the states and moves of a game up to some state, and the next move."""
        rng = np.random.default_rng([self.seed, prompt_index])
        game = FrozenLakeGame(
            size=self.size, frozen=0.8, is_slippery=False, actions=MOVES, separator=""
        )
        text = game.reset(int(rng.integers(2**31))) + "\n"
        turns = []
        for _ in range(int(rng.integers(1, self.max_moves + 1))):
            move = self.move(game.text(None), rng)
            turns.append((text, move))
            outcome = game.step(move)
            if outcome.done:
                break
            text += f"{move}{END}{outcome.text}\n"
        return Prompt(*turns[-1])

    def move(self, text, rng):
        good = good_moves(text.split("\n"))
        return str(rng.choice(good if rng.random() < self.skill else list(MOVES)))


def good_moves(rows):
    """Return the moves that bring the player nearer to the goal."""
    size = len(rows)
    cells = {(i, j): rows[i][j] for i in range(size) for j in range(size)}
    goal = next(cell for cell, kind in cells.items() if kind == "G")
    distances, edge = {goal: 0}, [goal]
    while edge:
        row, column = edge.pop(0)
        for near in ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column)):
            if near not in distances and cells.get(near, "O") not in "OX":
                distances[near] = distances[row, column] + 1
                edge.append(near)
    row, column = next(cell for cell, kind in cells.items() if kind == "P")
    steps = ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column))
    here = distances[row, column]
    return [move for move, to in zip(MOVES, steps, strict=True) if distances.get(to, here) < here]
