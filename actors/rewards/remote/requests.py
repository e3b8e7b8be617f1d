"""Requests of a reward to a service; a service that stays away fails its groups, named."""

import os
from typing import Any, TypeVar

from actors.engines.served.http import BusyError, Http, RefusedError
from actors.rewards.calls.limits import FinalError
from streamrl.config.section import Section
from streamrl.errors import ConfigError, RolloutError, TransportError

T = TypeVar("T")


class ServiceSettings(Section):
    """Where a service is."""

    url: str
    """Address of the service."""
    api_key_env: str | None = None
    """Name of the environment variable that has its key."""


class Service:
    """One service. Time-outs are those of the reward's calls."""

    def __init__(self, settings: ServiceSettings, timeout_s: float = 86_400.0) -> None:
        url, key = settings.url, None
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: was {url!r}; it begins with http:// or https://")
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if key is None:
                raise ConfigError(f"api_key_env: there is no variable {settings.api_key_env}")
        self._http = Http(url, api_key=key, timeout_s=timeout_s)

    async def post(self, path: str, body: Any, answer: type[T]) -> T:
        """The decoded answer. Waits for it.

        Raises:
            FinalError: the service refuses the request, and would again.
            RolloutError: it does not answer, or is busy.
        """
        try:
            return await self._http.post(path, body, answer)
        except (BusyError, TransportError) as error:
            raise RolloutError(str(error)) from error
        except RefusedError as error:
            kind = RolloutError if error.status >= 500 or error.status == 200 else FinalError
            raise kind(f"{self._http.url}: {error}") from error
