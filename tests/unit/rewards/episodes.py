"""Episodes to score."""

from typing import Any

from streamrl.interfaces import Episode, Prompt, Score
from streamrl.types import FinishReason


def episode(response: str = "", answer: str = "42", **row: Any) -> Episode:
    """An episode of one turn."""
    return Episode(Prompt("question", answer, row), response, len(response), FinishReason.STOP)


def values(scores: Any) -> list[float]:
    return [Score.of(score).reward for score in scores]
