"""Sums of two digits, each behind two answered sums that show the format of an answer.

2 + 3 = <answer>5</answer>
9 + 4 = <answer>13</answer>
7 + 6 =
"""

import numpy as np

from streamrl.interfaces import Prompt

SHOWN = "2 + 3 = <answer>5</answer>\n9 + 4 = <answer>13</answer>\n"


class Sums:
    """The training prompts: 80 of the 100 sums."""

    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, prompt_index):
        rng = np.random.default_rng([self.seed, prompt_index])
        while is_held_out(*(pair := rng.integers(0, 10, 2))):
            pass
        return prompt_of(*pair)


class HeldOut:
    """The other 20 sums, each once."""

    def __init__(self, seed):
        self.pairs = [(a, b) for a in range(10) for b in range(10) if is_held_out(a, b)]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return prompt_of(*self.pairs[index])


def is_held_out(a, b):
    """Hold out two sums of each row and of each column of the table of sums."""
    return (a + 3 * b) % 5 == 0


def prompt_of(a, b):
    return Prompt(f"{SHOWN}{a} + {b} =", str(a + b))
