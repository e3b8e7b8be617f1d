"""Whose a server is when a generator attaches: its label of its weights says so.

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

import socket
import time
from urllib.parse import urlsplit

from actors.engines.served.http import Http
from actors.engines.served.metrics import readings
from actors.engines.served.server import AnyLabels, Labels, is_of_a_run
from actors.engines.served.start import ServerKind, probe
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.errors import ConfigError

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


def attach(kind: ServerKind, http: Http, labels: Labels, num_candidates: int = 0) -> None:
    """Returns once the server may be used under these labels, or with its first weights, by a run
    that asks for so many candidates of a token at most.

    Raises:
        ConfigError: it is in use by others, or does not report what it samples.
        RefusedError, TransportError: a request failed.
    """
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
    probe(lambda request: kind.sample(http, AnyLabels(labels.owner), request), num_candidates)


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
