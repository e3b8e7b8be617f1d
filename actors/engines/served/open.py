"""How an engine starts on inference servers that are up, or come up in time.

Invariant: a server is attached (`actors.engines.served.attach`) before it gets a request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from actors.engines.candidates import most_asked
from actors.engines.served.attach import attach, labels_of_run
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.process import ServerProcess
from actors.engines.served.replicas import Replica, ReplicatedEngine
from actors.engines.served.server import Labels
from actors.engines.served.start import ServerKind, engine_on, model_id, wait_until_up
from streamrl.config import RunConfig
from streamrl.errors import ConfigError

# A request on a server that is gone is soon sampled again on another one.
_RETRY_S = 1.0
_CHECK_S = 0.5


def open_served(
    kind: ServerKind,
    config: RunConfig,
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
    labels = labels_of_run(config) if is_shared else Labels.new()
    try:
        wait_until_up(kind, http, process.require_alive if process else lambda: None)
        _attach(kind, config, http, labels)
        return engine_on(kind, config, http, labels, process=process)
    except BaseException:
        if process is not None:
            process.close()
        raise


def open_urls(
    kind: ServerKind, config: RunConfig, api_key: str | None, *, is_shared: bool
) -> ServedEngine | ReplicatedEngine:
    """An engine on the servers elsewhere that the settings name. An engine by itself, as that of an
    evaluation, takes the first of them.

    Raises:
        ConfigError: no server is up in time, one does not fit, or they serve different models.
    """
    first, *others = urls = kind.settings.urls
    if not (is_shared and others):
        return open_served(kind, config, Http(first, api_key=api_key), is_shared=is_shared)
    labels = labels_of_run(config)
    up = _wait_until_some_are_up(kind, [Http(url, api_key=api_key) for url in urls])
    for http in up:
        _attach(kind, config, http, labels)
    model = _one_model(up)

    def opener(url: str) -> Callable[[], Awaitable[ServedEngine]]:
        """Raises at once if the server is not up, or does not fit."""

        async def open_once() -> ServedEngine:
            http = Http(url, api_key=api_key)
            await asyncio.to_thread(_attach_again, kind, config, http, labels, model)
            return engine_on(kind, config, http, labels, retry_timeout_s=_RETRY_S)

        return open_once

    return ReplicatedEngine(
        [Replica(url, opener(url)) for url in urls],
        retry_timeout_s=kind.settings.retry_timeout_s,
    )


def _attach(kind: ServerKind, config: RunConfig, http: Http, labels: Labels) -> None:
    try:
        attach(kind, http, labels, most_asked(config))
    except RefusedError as error:
        raise kind.refusal(http, error) from error


def _attach_again(
    kind: ServerKind, config: RunConfig, http: Http, labels: Labels, model: str
) -> None:
    wait_until_up(kind, http, timeout_s=0.0)
    _attach(kind, config, http, labels)
    _require_model(http, model)


def _wait_until_some_are_up(kind: ServerKind, servers: Sequence[Http]) -> Sequence[Http]:
    """Those that are up. Waits for one of them, or for `start_timeout_s`."""
    until_s = time.monotonic() + kind.settings.start_timeout_s
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
