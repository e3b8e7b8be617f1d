"""Sums of two digits, behind two that are answered and so show what an answer looks like.

2 + 3 = <answer>5</answer>
9 + 4 = <answer>13</answer>
7 + 6 =
"""

import numpy as np

from streamrl.interfaces import Prompt

SHOWN = "2 + 3 = <answer>5</answer>\n9 + 4 = <answer>13</answer>\n"


class Sums:
    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, prompt_index):
        a, b = np.random.default_rng([self.seed, prompt_index]).integers(0, 10, 2)
        return Prompt(f"{SHOWN}{a} + {b} =", str(a + b))
