"""Services behind a URL: how rewards send requests to one, and the reward `http`, which posts all
siblings of a prompt in one request.

Invariant: if a service does not answer, its groups fail with an error that names it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from actors.engines.served.http import MAX_ANSWER_BYTES, BusyError, Http, RefusedError
from actors.rewards.calls.isolated import plain
from actors.rewards.calls.limits import FinalError
from actors.rewards.forms import conversation, gold_of
from streamrl.config.secrets import key_of
from streamrl.config.section import Section
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.interfaces import Episode, Score

T = TypeVar("T")


class ServiceSettings(Section):
    """Address and key of a service."""

    url: str
    """Address of the service."""
    api_key_env: str | None = None
    """Name of the environment variable with its key."""


class Service:
    """A client of one service. The limits of the reward's calls set its time-out."""

    def __init__(self, settings: ServiceSettings, timeout_s: float = 86_400.0) -> None:
        url = settings.url
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: was {url!r}; it begins with http:// or https://")
        key = key_of("api_key_env", settings.api_key_env)
        self._http = Http(url, api_key=key, timeout_s=timeout_s)

    async def post(
        self, path: str, body: Any, answer: type[T], max_bytes: int = MAX_ANSWER_BYTES
    ) -> T:
        """Post a request and return the decoded answer. Waits for it.

        Raises:
            FinalError: the service refuses the request, and would do so again.
            RolloutError: it does not answer, or is busy.
        """
        try:
            return await self._http.post(path, body, answer, max_bytes=max_bytes)
        except (BusyError, TransportError) as error:
            raise RolloutError(str(error)) from error
        except RefusedError as error:
            kind = RolloutError if error.status >= 500 or error.status == 200 else FinalError
            raise kind(f"{self._http.url}: {error}") from error


class ServiceAnswer(msgspec.Struct, frozen=True):
    """One reward for each episode, and optionally further numbers for each."""

    rewards: list[float]
    metrics: list[dict[str, float]] = []


class HttpReward:
    """Posts `{"episodes": [...]}`, reads `{"rewards": [...], "metrics": [...]}`."""

    Settings = ServiceSettings

    def __init__(self, settings: ServiceSettings) -> None:
        self._url = settings.url
        self._service = Service(settings)

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Score the siblings of a prompt. Waits for the answer."""
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
        "answer": gold_of(episode.prompt),
        "row": episode.prompt.row,
        "num_response_tokens": episode.num_response_tokens,
        "finish_reason": episode.finish_reason,
        "turn_rewards": episode.turn_rewards,
        "metrics": episode.metrics,
    }
