"""What an engine asks of an inference server before it starts: that it is up, and fits.

Blocking, since a generator has nothing else to do before its engine is up.
"""

import math
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from actors.engines.model import ModelFacts
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import Labels, Request, Server
from streamrl.config import RunConfig
from streamrl.config.engines.server import ServerSettings
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.types import Completion, SamplingParams

_CHECK_S = 0.5
_ANSWER_S = 60.0


class Model(Struct, frozen=True):
    max_model_len: int
    id: str = ""


class Models(Struct, frozen=True):
    """Both libraries' answer to /v1/models: the fields that we read."""

    data: Annotated[list[Model], Meta(min_length=1)]


class ServerKind(Protocol):
    """One library's server before its first request.

    All but `server` make blocking requests, and raise RefusedError or TransportError for those that
    fail.
    """

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        ...

    def require_up(self, http: Http) -> None:
        """Returns if the server takes requests."""
        ...

    def require_settings(self, http: Http) -> None:
        """
        Raises:
            ConfigError: the server was not started as the configuration needs it.
        """
        ...

    @property
    def looks(self) -> tuple[str, str]:
        """The gauge, as in `metrics.Names`, that counts requests for the label of the weights."""
        ...

    def label(self, http: Http) -> str:
        """The server's label of its weights."""
        ...

    def take(self, http: Http, labels: Labels) -> None:
        """Labels the server as taken; it samples, whatever state it was left in."""
        ...

    def restore(self, http: Http, labels: Labels) -> None:
        """Loads the model folder's weights, whatever an earlier generator has loaded, and labels
        them as version 0."""
        ...

    def sample(self, http: Http, labels: Labels, request: Request) -> Completion:
        """Whatever the weights are called."""
        ...

    def refusal(self, http: Http, error: RefusedError) -> ConfigError:
        """The error for a server that refuses one of these requests."""
        ...

    def server(self, http: Http, labels: Labels) -> Server: ...


def engine_on(
    kind: ServerKind,
    config: RunConfig,
    http: Http,
    labels: Labels,
    *,
    retry_timeout_s: float | None = None,
    process: ServerProcess | None = None,
) -> ServedEngine:
    """The engine on a server that is attached; call it in the event loop."""
    return ServedEngine(
        kind.server(http, labels),
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        retry_timeout_s=retry_timeout_s or kind.settings.retry_timeout_s,
        keeps_old_kv=kind.keeps_old_kv,
        process=process,
    )


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "127.0.0.1"


def wait_until_up(
    kind: ServerKind,
    http: Http,
    require_alive: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
) -> None:
    """Waits until the server takes requests; unblocked by it, by `require_alive`, which raises when
    the server's process has ended, or by the timeout (else `start_timeout_s`)."""
    timeout_s = kind.settings.start_timeout_s if timeout_s is None else timeout_s
    until_s = time.monotonic() + timeout_s
    while True:
        require_alive()
        try:
            return kind.require_up(http)
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"generator: {http.url} wants another key (api_key_variable): {error}"
                ) from error
            message = str(error)
        except TransportError as error:
            message = str(error)
        if time.monotonic() > until_s:
            raise ConfigError(f"no inference server at {http.url} in {timeout_s:g} s: {message}")
        time.sleep(_CHECK_S)


def require_length(http: Http, config: RunConfig, num_reserved: int = 0) -> None:
    """Refuses a server whose context is too short; it keeps `num_reserved` positions of it."""
    models = http.request_sync("GET", "/v1/models", answer=Models)
    longest = models.data[0].max_model_len - num_reserved
    if longest < config.max_model_len:
        raise ConfigError(
            f"the server at {http.url} takes {longest} tokens of prompt and completion, and "
            f"generator.max_model_len is {config.max_model_len}"
        )


def model_id(http: Http) -> str:
    """The name of the model that the server serves."""
    answer: Models = http.request_sync("GET", "/v1/models", answer=Models)
    return answer.data[0].id


def request_timeout_s(config: RunConfig) -> float:
    """Longest wait for one completion, which fails then; its episode's deadline ends it before,
    unless the server does not answer."""
    return config.generator.group_deadline_s + _ANSWER_S


def probe(sample: Callable[[Request], Completion], num_candidates: int = 0) -> None:
    """Samples one token with top_k 1: under the truncated distribution its log-probability is 0.
    A server that does not give as many candidates of a token as the run asks for refuses it.

    Raises:
        ConfigError: the server reports log-probabilities of another distribution.
    """
    request = Request(
        # A server refuses two requests of one id, and several generators may start at once.
        id=f"probe-{uuid.uuid4().hex}",
        # Not 0 alone: a padding token without an embedding makes all candidates alike.
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(
            max_new_tokens=1, top_k=1, num_top_logprobs=max(0, num_candidates - 1)
        ),
        max_new_tokens=1,
        stops=frozenset(),
        cache_salt="probe",
    )
    try:
        answer = sample(request)
    except RolloutError as error:
        raise ConfigError(f"the inference server fails at its first token: {error}") from error
    logprob = float(answer.logprobs[0]) if len(answer.logprobs) else math.nan
    if not abs(logprob) <= 1e-3:
        raise ConfigError(
            "the inference server does not report log-probabilities of the distribution it samples "
            f"from: that of the only candidate was {logprob:.3f} instead of 0"
        )
