"""The task of bench_async, named as PATH.py:NAME: spell out a span of a ring of characters.

    >0f=   0123456789abcdef          upward, a span of at most `TURN` characters
    <f0=   fedcba9876543210          downward, where the span is longer

The lengths of the spans are uniform, or log-normal with `tail` > 0. Long answers have a direction
of their own, so that short ones do not teach it: a run that trains on few long answers scores lower
on them.

Invariant: a prompt is a pure function of (seed, prompt index), and no held-out prompt is trained.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamrl.interfaces import Episode, Prompt

RING = "".join(
    map(chr, (*range(0x30, 0x3A), *range(0x61, 0x7B), *range(0x41, 0x5B), *range(0x3B1, 0x3D7)))
)
ALPHABET = RING + "<>="
TURN = 40
_KEPT_OUT = np.random.default_rng(0).random((len(RING), len(RING) + 1)) < 0.2
"""[start, length]: the spans that are held out, at random, so that no rule describes them."""
_WARM_START = 2**30
"""The warm start of a model reads prompts from here on, and may see any span."""


class Spans:
    """The training stream."""

    def __init__(self, seed: int, min_length: int, max_length: int, tail: float = 0.0) -> None:
        self._seed = seed
        self._shortest, self._longest, self._tail = min_length, max_length, tail

    def __getitem__(self, prompt_index: int) -> Prompt:
        rng = np.random.default_rng([self._seed, 0, prompt_index])
        length = self._length(rng)
        allowed = ~_KEPT_OUT[:, length] | (prompt_index >= _WARM_START)
        return span(int(rng.choice(np.flatnonzero(allowed))), length, prompt_index)

    def _length(self, rng: np.random.Generator) -> int:
        if self._tail == 0:
            return int(rng.integers(self._shortest, self._longest + 1))
        drawn = self._shortest * rng.lognormal(0.0, self._tail)
        return int(np.clip(drawn, self._shortest, self._longest))


class HeldOutSpans:
    """Held-out prompts: buckets (shortest, longest) by turns, with uniform lengths in each."""

    def __init__(self, seed: int, buckets: Sequence[tuple[int, int]]) -> None:
        self._seed = seed
        self._buckets = buckets

    def __getitem__(self, prompt_index: int) -> Prompt:
        rng = np.random.default_rng([self._seed, 1, prompt_index])
        shortest, longest = self._buckets[prompt_index % len(self._buckets)]
        length = int(rng.integers(shortest, longest + 1))
        start = int(rng.choice(np.flatnonzero(_KEPT_OUT[:, length])))
        return span(start, length, prompt_index)


def span(start: int, length: int, prompt_index: int) -> Prompt:
    """The prompt whose answer has `length` characters, from the one at `start` of the ring on."""
    step, mark = (-1, "<") if length > TURN else (1, ">")
    answer = "".join(RING[(start + step * i) % len(RING)] for i in range(length))
    return Prompt(f"{mark}{answer[0]}{answer[-1]}=", answer, {"prompt_index": prompt_index})


def exact_match(episodes: Sequence[Episode], log: str | None = None) -> list[float]:
    """1.0 where the response is the answer.

    With `log`, one line a group is appended to that file: prompt index, prompt, response lengths.
    """
    if log is not None:
        prompt = episodes[0].prompt
        lengths = [episode.num_response_tokens for episode in episodes]
        line = json.dumps([prompt.row["prompt_index"], prompt.content, lengths])
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return [float(episode.response == episode.prompt.answer) for episode in episodes]
