"""Before the first request: wait for a server, and see that it answers as the engine needs it to.

Blocking, since a generator has nothing else to do before its engine is up.
"""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from actors.engines.served.http import Http, RefusedError
from actors.engines.served.server import Request
from streamrl.config import RunConfig
from streamrl.config.engines.server import ServerSettings
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.types import Completion, SamplingParams

_CHECK_S = 0.5


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "127.0.0.1"


def wait_until_up(
    http: Http,
    path: str,
    settings: ServerSettings,
    require_alive: Callable[[], None] = lambda: None,
) -> None:
    """Waits until the server answers `path`; unblocked by it, by `require_alive`, which raises when
    the server's process has ended, or by `start_timeout_s`."""
    until_s = time.monotonic() + settings.start_timeout_s
    while True:
        require_alive()
        try:
            http.now("GET", path)
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"generator: {http.url} wants another key (api_key_variable): {error}"
                ) from error
            words = str(error)
        except TransportError as error:
            words = str(error)
        else:
            return
        if time.monotonic() > until_s:
            raise ConfigError(
                f"no inference server at {http.url} in {settings.start_timeout_s:g} s: {words}"
            )
        time.sleep(_CHECK_S)


def require_length(http: Http, config: RunConfig, num_reserved: int = 0) -> None:
    """Refuse a server that would cut what this configuration wants to sample; of its length
    `num_reserved` positions are for itself."""
    longest = http.now("GET", "/v1/models")["data"][0]["max_model_len"] - num_reserved
    if longest < config.max_model_len:
        raise ConfigError(
            f"the server at {http.url} takes {longest} tokens of prompt and completion, and "
            f"generator.max_model_len is {config.max_model_len}"
        )


def probe(ask: Callable[[Request], Completion | None]) -> None:
    """One token sampled among the one likeliest: under what it was sampled from, its
    log-probability is 0.

    Raises:
        ConfigError: the server reports log-probabilities of something else.
    """
    request = Request(
        id="probe",
        # Not 0 alone: a padding token without an embedding makes all candidates alike.
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_new_tokens=1, top_k=1),
        max_new_tokens=1,
        stops=frozenset(),
        cache_salt="probe",
    )
    try:
        answer = ask(request)
    except RolloutError as error:
        raise ConfigError(f"the inference server fails at its first token: {error}") from error
    if answer is None or abs(float(answer.logprobs[0])) > 1e-3:
        told = "nothing" if answer is None else f"{float(answer.logprobs[0]):.3f}"
        raise ConfigError(
            "the inference server does not report log-probabilities of the distribution it samples "
            f"from: the only candidate had {told} instead of 0"
        )
