"""How an engine starts on inference servers that are up, or come up in time.

First it is asked whether it is up, and fits: this blocks, since a generator has nothing else to do
before its engine is up. Invariant: a server is attached before it gets a request.

`attach`: whose a server is, its label of its weights says.

    the label of           a generator of the run       an engine by itself
    this run               uses the server as it is     -
    another run, in use    ends with a sentence         ends with a sentence
    another run, unused    takes it                     restores the model folder's weights
    somebody else, or none takes it                     restores the model folder's weights

The learner sends the weights to a generator that takes a server, before it leases. Generators look
at the label again and again, so a server whose looks are counted up is in use.

Invariant: a server with the label of this run is not touched, since a generator may be loading
weights there.
"""

import asyncio
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from actors.engines.model import ModelFacts
from actors.engines.reported import most_asked
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError, readings
from actors.engines.served.process import ServerProcess
from actors.engines.served.replicas import Replica, ReplicatedEngine
from actors.engines.served.server import AnyLabels, Labels, ServedRequest, Server, is_of_a_run
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.config.generator import GeneratorSettings
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
    def config(self) -> RunConfig:
        """Of the run that is to use it."""
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
        """The gauge, as in `http.Names`, that counts requests for the label of the weights."""
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

    def sample(self, http: Http, labels: Labels, request: ServedRequest) -> Completion:
        """Whatever the weights are called."""
        ...

    def refusal(self, http: Http, error: RefusedError) -> ConfigError:
        """The error for a server that refuses one of these requests."""
        ...

    def server(self, http: Http, labels: Labels) -> Server: ...


def engine_on(
    kind: ServerKind,
    http: Http,
    labels: Labels,
    *,
    retry_timeout_s: float | None = None,
    process: ServerProcess | None = None,
) -> ServedEngine:
    """The engine on a server that is attached; call it in the event loop."""
    config, settings = kind.config, kind.config.generator.served
    return ServedEngine(
        kind.server(http, labels),
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        retry_timeout_s=retry_timeout_s or settings.retry_timeout_s,
        keeps_old_kv=settings.keeps_old_kv,
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
    if timeout_s is None:
        timeout_s = kind.config.generator.served.start_timeout_s
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


def require_length(http: Http, max_model_len: int, num_reserved: int = 0) -> None:
    """Refuses a server whose context is too short; it keeps `num_reserved` positions of it."""
    models = http.request_sync("GET", "/v1/models", answer=Models)
    longest = models.data[0].max_model_len - num_reserved
    if longest < max_model_len:
        raise ConfigError(
            f"the server at {http.url} takes {longest} tokens of prompt and completion, and "
            f"generator.max_model_len is {max_model_len}"
        )


def model_id(http: Http) -> str:
    """The name of the model that the server serves."""
    answer: Models = http.request_sync("GET", "/v1/models", answer=Models)
    return answer.data[0].id


def request_timeout_s(generator: GeneratorSettings) -> float:
    """Longest wait for one completion, which fails then; its episode's deadline ends it before,
    unless the server does not answer."""
    return generator.group_deadline_s + _ANSWER_S


def probe(
    sample: Callable[[ServedRequest], Completion],
    num_candidates: int = 0,
    *,
    keeps_experts: bool = False,
) -> None:
    """Samples one token with top_k 1: under the truncated distribution its log-probability is 0.
    A server that does not give as many candidates of a token as the run asks for, or no experts,
    refuses it.

    Raises:
        ConfigError: the server reports log-probabilities of another distribution.
    """
    request = ServedRequest(
        # A server refuses two requests of one id, and several generators may start at once.
        id=f"probe-{uuid.uuid4().hex}",
        # Not 0 alone: a padding token without an embedding makes all candidates alike.
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(
            max_new_tokens=1,
            top_k=1,
            num_top_logprobs=max(0, num_candidates - 1),
            keep_routed_experts=keeps_experts,
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


# Longer than the time between two looks at the label, on a busy machine too.
_WINDOW_S, _NUM_WINDOWS = 2.0, 3


def labels_of_run(config: RunConfig) -> Labels:
    """Those of the generators that have one learner and the same way to load its weights."""
    address, served = config.weights.address, config.generator.served
    host = socket.gethostname() if is_loopback(address) else ""
    pause = f"{served.pause_mode} {served.recompute_kv}"
    return Labels.of_run(f"{config.run.name} {host} {address} {pause}")


def server_id(url: str) -> str:
    """The same for two generators of one server, if both reach it by one address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = host
    if address.startswith("127."):
        address = socket.gethostname()
    return f"{address}:{parts.port or parts.scheme}"


def attach(kind: ServerKind, http: Http, labels: Labels) -> None:
    """Returns once the server may be used under these labels, or with its first weights.

    Raises:
        ConfigError: it is in use by others, does not report what the run asks for, or refuses a
            request.
        TransportError: a request failed.
    """
    try:
        _attach(kind, http, labels)
    except RefusedError as error:
        raise kind.refusal(http, error) from error


def _attach(kind: ServerKind, http: Http, labels: Labels) -> None:
    kind.require_settings(http)
    label = kind.label(http)
    if labels.is_shared and labels.is_own(label):
        return
    if is_of_a_run(label) and _is_in_use(kind, http):
        raise ConfigError(
            f"generator: the server at {http.url} is in use by generators of another run, or of "
            "this one with another weights.address, run.name, pause_mode or recompute_kv (its "
            f"weights are called {label[:100]!r}); give each run a server of its own"
        )
    if not labels.is_shared:
        kind.restore(http, labels)
    elif not labels.is_own(kind.label(http)):
        kind.take(http, labels)
    else:
        return
    probe(
        lambda request: kind.sample(http, AnyLabels(labels.owner), request),
        most_asked(kind.config),
        keeps_experts=kind.config.algorithm.records_experts,
    )


def _is_in_use(kind: ServerKind, http: Http) -> bool:
    """Whether others look at the server's label all the time. Waits for as long as it takes."""
    for _ in range(_NUM_WINDOWS):
        before = _num_looks(kind, http)
        time.sleep(_WINDOW_S)
        if _num_looks(kind, http) <= before:
            return False
    return True


def _num_looks(kind: ServerKind, http: Http) -> float:
    return readings(http.text_sync("/metrics"), {"looks": kind.looks})["looks"]


# A request on a server that is gone is soon sampled again on another one.
_RETRY_S = 1.0


def open_served(
    kind: ServerKind,
    http: Http,
    process: ServerProcess | None = None,
    *,
    is_shared: bool = False,
) -> ServedEngine:
    """An engine on the server at `http`, checked. Generators of a run share it if `is_shared`, and
    get their first weights from the learner; else it has the model folder's. `process` is the
    server's if this engine started it; it ends with the engine, or here if the start fails.

    Raises:
        ConfigError: the server is not up in time, or does not fit the configuration.
    """
    labels = labels_of_run(kind.config) if is_shared else Labels.new()
    try:
        wait_until_up(kind, http, process.require_alive if process else lambda: None)
        attach(kind, http, labels)
        return engine_on(kind, http, labels, process=process)
    except BaseException:
        if process is not None:
            process.close()
        raise


def open_urls(kind: ServerKind, *, is_shared: bool) -> ServedEngine | ReplicatedEngine:
    """An engine on the servers elsewhere that the settings name. An engine by itself, as that of an
    evaluation, takes the first of them.

    Raises:
        ConfigError: no server is up in time, one does not fit, or they serve different models.
    """
    settings = kind.config.generator.served
    connected = partial(Http, api_key=settings.api_key)
    first, *others = urls = settings.urls
    if not (is_shared and others):
        return open_served(kind, connected(first), is_shared=is_shared)
    labels = labels_of_run(kind.config)
    up = _wait_until_some_are_up(kind, [connected(url) for url in urls])
    for http in up:
        attach(kind, http, labels)
    model = _one_model(up)

    def opener(url: str) -> Callable[[], Awaitable[ServedEngine]]:
        """Raises at once if the server is not up, or does not fit."""

        async def open_once() -> ServedEngine:
            http = connected(url)
            await asyncio.to_thread(_attach_again, kind, http, labels, model)
            return engine_on(kind, http, labels, retry_timeout_s=_RETRY_S)

        return open_once

    return ReplicatedEngine(
        [Replica(url, opener(url)) for url in urls],
        retry_timeout_s=settings.retry_timeout_s,
    )


def _attach_again(kind: ServerKind, http: Http, labels: Labels, model: str) -> None:
    wait_until_up(kind, http, timeout_s=0.0)
    attach(kind, http, labels)
    _require_model(http, model)


def _wait_until_some_are_up(kind: ServerKind, servers: Sequence[Http]) -> Sequence[Http]:
    """Those that are up. Waits for one of them, or for `start_timeout_s`."""
    until_s = time.monotonic() + kind.config.generator.served.start_timeout_s
    while True:
        up = [http for http in servers if _is_up(kind, http)]
        if up:
            return up
        if time.monotonic() > until_s:
            wait_until_up(kind, servers[0], timeout_s=0.0)
        time.sleep(_CHECK_S)


def _is_up(kind: ServerKind, http: Http) -> bool:
    try:
        wait_until_up(kind, http, timeout_s=0.0)
    except ConfigError:
        return False
    return True


def _one_model(servers: Sequence[Http]) -> str:
    model = model_id(servers[0])
    for http in servers[1:]:
        _require_model(http, model)
    return model


def _require_model(http: Http, model: str) -> None:
    if (other := model_id(http)) != model:
        raise ConfigError(
            f"generator: the server at {http.url} serves {other[:200]}, and others of the same "
            f"generator serve {model[:200]}; name servers of one model (both libraries take "
            "--served-model-name if only its path differs)"
        )
