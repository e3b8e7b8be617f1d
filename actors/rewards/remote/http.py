"""The reward `http`: a service that scores episodes, all siblings of a prompt in one request."""

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.rewards.calls.isolated import plain
from actors.rewards.forms import conversation, ground_truth
from actors.rewards.remote.requests import Service, ServiceSettings
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode, Score


class ServiceAnswer(msgspec.Struct, frozen=True):
    """One reward for each episode, and further numbers for each, if there are any."""

    rewards: list[float]
    metrics: list[dict[str, float]] = []


class HttpReward:
    """Posts `{"episodes": [...]}`, reads `{"rewards": [...], "metrics": [...]}`."""

    class Settings(ServiceSettings):
        """Arguments of `http`."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.url
        self._service = Service(settings)

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Waits for the answer."""
        body = msgspec.to_builtins({"episodes": [_sent(e) for e in episodes]}, enc_hook=plain)
        answer = await self._service.post("", body, ServiceAnswer)
        metrics = answer.metrics or [{} for _ in answer.rewards]
        if len(metrics) != len(answer.rewards):
            raise RolloutError(
                f"{self._url}: answered {len(answer.rewards)} rewards and {len(metrics)} metrics"
            )
        return [Score(*one) for one in zip(answer.rewards, metrics, strict=True)]


def _sent(episode: Episode) -> dict[str, Any]:
    return {
        "messages": conversation(episode),
        "response": episode.response,
        "answer": ground_truth(episode),
        "row": episode.prompt.row,
        "num_response_tokens": episode.num_response_tokens,
        "finish_reason": episode.finish_reason,
        "turn_rewards": episode.turn_rewards,
        "metrics": episode.metrics,
    }
