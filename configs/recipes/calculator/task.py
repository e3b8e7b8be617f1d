"""Products of two numbers, and the examples for the model's warm start.

37*48?              the prompt
[37*48]             a call of the calculator
(1776)              its result
1776                the answer
"""

import numpy as np

from streamrl.interfaces import Prompt

END = "</s>"


class Products:
    """Two numbers of two digits, and their product."""

    held_out = False

    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, prompt_index):
        a, b = factors(np.random.default_rng([self.seed, prompt_index]), self.held_out)
        return Prompt(f"{a}*{b}?", str(a * b))


class HeldOut(Products):
    """The tenth of all products that training never shows."""

    held_out = True


class Examples:
    """Single turns. Half of them answer after a result; of the others, a share `guesses` guesses
    the product, and the rest calls the calculator.

    Calls and answers have a wrong digit with probability `slips`, so that there is more to learn.
    """

    def __init__(self, seed, guesses=0.5, slips=0.25):
        self.seed, self.guesses, self.slips = seed, guesses, slips

    def __getitem__(self, prompt_index):
        rng = np.random.default_rng([self.seed, prompt_index])
        a, b = factors(rng)
        call, answer = f"[{a}*{b}]", str(a * b)
        if rng.random() < 0.5:
            return Prompt(f"{a}*{b}?{call}{END}({answer})", self.slip(answer, rng))
        if rng.random() < self.guesses:
            return Prompt(f"{a}*{b}?", str(rng.integers(100, 10000)))
        return Prompt(f"{a}*{b}?", self.slip(call, rng))

    def slip(self, text, rng):
        """Return the text, with one random digit replaced with probability `slips`."""
        if rng.random() >= self.slips:
            return text
        place = int(rng.choice([i for i, character in enumerate(text) if character.isdigit()]))
        return f"{text[:place]}{rng.integers(10)}{text[place + 1 :]}"


def factors(rng, held_out=False):
    while True:
        a, b = (int(number) for number in rng.integers(10, 100, 2))
        if ((a + b) % 10 == 0) == held_out:
            return a, b
