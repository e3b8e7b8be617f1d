"""Starts an engine on inference servers that are up or come up in time. It blocks: a generator has
nothing else to do before its engine is up.

A server's label of its weights says whose it is:

    the label of           a generator of the run       an engine by itself
    this run               uses the server as it is     -
    another run, in use    ends with an error           ends with an error
    another run, unused    takes it                     restores the model folder's weights
    somebody else, or none takes it                     restores the model folder's weights

A generator that takes a server gets the weights from the learner before it leases. Generators look
at the label repeatedly, so a server whose count of looks grows is in use.

Invariant: a server is attached before it gets requests, and one with this run's label is not
touched, since a generator may be loading weights there.
"""

import asyncio
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from actors.engines.completions import most_asked
from actors.engines.model import ModelFacts
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.process import ServerProcess
from actors.engines.served.replicas import Replica, ReplicatedEngine
from actors.engines.served.server import AnyLabels, Labels, ServedRequest, Server, is_of_a_run
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.errors import ConfigError, RolloutError, StreamRLError, TransportError
from streamrl.shutdown import in_thread
from streamrl.types import Completion, SamplingParams

T = TypeVar("T")
_CHECK_S, _PROBE_S = 0.5, 60.0


class Model(Struct, frozen=True):
    max_model_len: int
    id: str = ""


class Models(Struct, frozen=True):
    """The answer of both libraries to /v1/models: the fields that we read."""

    data: Annotated[list[Model], Meta(min_length=1)]


def engine_on(
    config: RunConfig,
    server: Server,
    facts: ModelFacts,
    *,
    retry_timeout_s: float | None = None,
    process: ServerProcess | None = None,
) -> ServedEngine:
    """Make the engine on an attached server; call it in the event loop."""
    settings = config.generator.served
    return ServedEngine(
        server,
        facts,
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        retry_timeout_s=retry_timeout_s or settings.retry_timeout_s,
        keeps_old_kv=settings.keeps_old_kv,
        process=process,
    )


async def wait_until_up(
    servers: Sequence[Server],
    timeout_s: float = 0.0,
    require_alive: Callable[[], None] = lambda: None,
) -> Sequence[Server]:
    """The servers that take requests. Waits for at least one, until the timeout, or until
    `require_alive` raises because the server's process has ended."""
    until_s = time.monotonic() + timeout_s
    while True:
        require_alive()
        up, errors = [], dict[str, StreamRLError]()
        for server in servers:
            try:
                await server.require_up()
                up.append(server)
            except (RefusedError, TransportError) as error:
                errors[server.http.url] = error
        if up:
            return up
        for url, reason in errors.items():
            if isinstance(reason, RefusedError) and reason.status in (401, 403):
                raise ConfigError(
                    f"generator: {url} wants another key (api_key_env): {reason}"
                ) from reason
        if time.monotonic() > until_s:
            url, reason = next(iter(errors.items()))
            raise ConfigError(f"no inference server at {url} in {timeout_s:g} s: {reason}")
        await asyncio.sleep(_CHECK_S)


async def require_length(http: Http, max_model_len: int, num_reserved: int = 0) -> None:
    """Refuse a server whose context is too short; the server reserves `num_reserved` positions of
    it."""
    longest = (await served_model(http)).max_model_len - num_reserved
    if longest < max_model_len:
        raise ConfigError(
            f"the server at {http.url} takes {longest} tokens of prompt and completion, and "
            f"generator.max_model_len is {max_model_len}"
        )


async def served_model(http: Http) -> Model:
    return (await http.get("/v1/models", Models)).data[0]


async def probe(
    sample: Callable[[ServedRequest], Awaitable[Completion]],
    num_candidates: int = 0,
    *,
    keeps_experts: bool = False,
) -> None:
    """Sample one token with top_k 1: under the truncated distribution its log-probability is 0. A
    server that cannot report that many candidates, or experts, refuses this.

    Raises:
        ConfigError: the server reports log-probabilities of another distribution.
    """
    request = ServedRequest(
        # A server refuses two requests with the same id, and several generators may start at once.
        id=f"probe-{uuid.uuid4().hex}",
        # Not just token 0: a padding token without an embedding makes all candidates equal.
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(
            max_new_tokens=1,
            top_k=1,
            num_top_logprobs=max(0, num_candidates - 1),
            keep_routed_experts=keeps_experts,
        ),
        stops=frozenset(),
        cache_salt="probe",
    )
    try:
        async with asyncio.timeout(_PROBE_S):
            answer = await sample(request)
    except TimeoutError as error:
        raise ConfigError(f"the inference server has no token in {_PROBE_S:g} s") from error
    except RolloutError as error:
        raise ConfigError(f"the inference server fails at its first token: {error}") from error
    logprob = float(answer.logprobs[0]) if len(answer.logprobs) else math.nan
    if not abs(logprob) <= 1e-3:
        raise ConfigError(
            "the inference server does not report log-probabilities of the distribution it samples "
            f"from: that of the only candidate was {logprob:.3f} instead of 0"
        )


# Longer than the time between two looks at the label, even on a busy machine.
_WINDOW_S, _NUM_WINDOWS = 2.0, 3


def labels_of_run(config: RunConfig) -> Labels:
    """The labels shared by generators that have the same learner and load its weights in the same
    way."""
    address, served = config.weights.address, config.generator.served
    host = socket.gethostname() if is_loopback(address) else ""
    pause = f"{served.pause_mode} {served.recompute_kv}"
    return Labels.of_run(f"{config.run.name} {host} {address} {pause}")


def server_id(url: str) -> str:
    """Equal for two generators of one server, if both use the same address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = host
    if address.startswith("127."):
        address = socket.gethostname()
    return f"{address}:{parts.port or parts.scheme}"


async def attach(config: RunConfig, server: Server) -> None:
    """Attach the server: returns once it may be used under its labels, or with its first weights.

    Raises:
        ConfigError: others use it, it does not fit, or it refuses a request.
        TransportError: a request failed.
    """
    keeps_experts = config.algorithm.records_experts
    try:
        if await _takes_over(server):
            # A server that was just taken has no version.
            server.labels = AnyLabels(server.labels.owner)
            await probe(server.sample, most_asked(config), keeps_experts=keeps_experts)
    except RefusedError as error:
        raise server.refusal(error) from error


async def _takes_over(server: Server) -> bool:
    """Take the server if it was not ours; return whether it was taken."""
    await server.require_settings()
    label = await server.label()
    if _is_ours(server, label):
        return False
    if is_of_a_run(label) and await _is_in_use(server):
        # Those looking may be generators of this run, and one of them may have taken the server
        # meanwhile.
        label = await server.label()
        if _is_ours(server, label):
            return False
        raise ConfigError(
            f"generator: the server at {server.http.url} is in use by generators of another run, "
            "or of this one with another weights.address, run.name, pause_mode or recompute_kv "
            f"(its weights are called {label[:100]!r}); give each run a server of its own"
        )
    if not server.labels.is_shared:
        await server.restore()
    elif _is_ours(server, await server.label()):
        return False
    else:
        await server.take()
    return True


def _is_ours(server: Server, label: str) -> bool:
    """Whether generators that share the server have it."""
    return server.labels.is_shared and server.labels.is_own(label)


async def _is_in_use(server: Server) -> bool:
    """Whether others keep looking at the server's label."""
    for _ in range(_NUM_WINDOWS):
        before = await server.num_looks()
        await asyncio.sleep(_WINDOW_S)
        if await server.num_looks() <= before:
            return False
    return True


MakeServer: TypeAlias = Callable[[str, Labels], Server]
"""Makes the `Server` for a URL and labels."""
# A request on a lost server is soon sampled again on another one.
_RETRY_S = 1.0


def open_served(
    config: RunConfig,
    make: MakeServer,
    url: str,
    process: ServerProcess | None = None,
    *,
    is_shared: bool = False,
) -> ServedEngine:
    """Check the server at `url` and make an engine on it; raises as `open_urls` does.

    Args:
        process: the server's, if this engine started it; it is ended if the start fails.
        is_shared: whether generators share the server, and get their first weights from the
        learner.
    """
    labels = labels_of_run(config) if is_shared else Labels.new()
    timeout_s = config.generator.served.start_timeout_s
    require_alive = process.require_alive if process else lambda: None
    try:
        _wait_for(_attached(config, [make(url, labels)], timeout_s, require_alive))
        return engine_on(config, make(url, labels), ModelFacts.of(config.model), process=process)
    except BaseException:
        if process is not None:
            process.close()
        raise


def open_urls(
    config: RunConfig, make: MakeServer, *, is_shared: bool
) -> ServedEngine | ReplicatedEngine:
    """Make an engine on the servers that the settings name. An engine that is not shared, such as
    an evaluation's, uses only the first of them.

    Raises:
        ConfigError: no server is up in time, one does not fit, or they serve different models.
    """
    settings = config.generator.served
    if not (is_shared and settings.urls[1:]):
        return open_served(config, make, settings.urls[0], is_shared=is_shared)
    labels, facts = labels_of_run(config), ModelFacts.of(config.model)
    servers = [make(url, labels) for url in settings.urls]
    model = _wait_for(_attached(config, servers, settings.start_timeout_s))

    async def open_once(url: str) -> ServedEngine:
        _require_one_model(url, await _attached(config, [make(url, labels)]), model)
        return engine_on(config, make(url, labels), facts, retry_timeout_s=_RETRY_S)

    return ReplicatedEngine(
        [Replica(url, partial(open_once, url)) for url in settings.urls],
        retry_timeout_s=settings.retry_timeout_s,
    )


def _wait_for(steps: Coroutine[Any, Any, T]) -> T:
    """Run the steps in a separate event loop, since the waiting thread may already run one; return
    their result. If interrupted, the steps are abandoned."""
    return in_thread(lambda: asyncio.run(steps), "engine's start").result()


async def _attached(
    config: RunConfig,
    servers: Sequence[Server],
    timeout_s: float = 0.0,
    require_alive: Callable[[], None] = lambda: None,
) -> str:
    """Attach the servers that are up; return their model's name. Waits like `wait_until_up`."""
    try:
        up = await wait_until_up(servers, timeout_s, require_alive)
        for server in up:
            await attach(config, server)
        model = (await served_model(up[0].http)).id
        for server in up[1:]:
            _require_one_model(server.http.url, (await served_model(server.http)).id, model)
        return model
    finally:
        for server in servers:
            await server.close()


def _require_one_model(url: str, served: str, model: str) -> None:
    if served != model:
        raise ConfigError(
            f"generator: the server at {url} serves {served[:200]}, and others of the same "
            f"generator serve {model[:200]}; name servers of one model (both libraries take "
            "--served-model-name if only its path differs)"
        )
