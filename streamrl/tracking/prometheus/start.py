"""The metrics of a daemon while it runs, if `tracking.prometheus` asks for them.

prometheus-client is imported only then.

Prometheus finds a daemon by a file of service discovery beside the run folders. `file_sd_configs`
reads runs/.prometheus/*.json, a file NAME@ID.json for each daemon of each run. A launch removes
those of its run, a daemon that ends as it should its own; that of one that was killed stays, so
that Prometheus shows that it is gone.
"""

import json
import logging
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import streamrl
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.config.tracking import PrometheusSettings
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.run_folder import target_file
from streamrl.tracking.prometheus.exported import PREFIX, Exported

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

log = logging.getLogger(__name__)

_PLACES = {"buffer": 0, "learner": 1, "validator": 2}
_GENERATORS = 10


def port_of(settings: PrometheusSettings, daemon_id: str) -> int:
    """The port that the setting gives to this daemon; 0 is any free one.

    >>> port_of(PrometheusSettings(port=9400), "generator-3")
    9413
    """
    numbered = re.fullmatch(r".*-(\d{1,3})", daemon_id)
    if not settings.port or (daemon_id not in _PLACES and not numbered):
        return 0
    if numbered:
        return settings.port + _GENERATORS + int(numbered[1])
    return settings.port + _PLACES[daemon_id]


def serve(
    settings: PrometheusSettings, daemon_id: str, registry: "CollectorRegistry"
) -> "WSGIServer":
    """The server of prometheus-client at the daemon's port, or at a free one where another process
    has it. It answers each scrape in a thread of its own.

    Raises:
        ConfigError: this machine has no such address.
    """
    from prometheus_client import start_http_server

    host, port = settings.host, port_of(settings, daemon_id)
    try:
        try:
            return start_http_server(port, host, registry)[0]
        except OSError as error:
            if not port:
                raise
            log.warning(
                "metrics: cannot listen at %s:%d: %s; taking a free port", host, port, error
            )
            return start_http_server(0, host, registry)[0]
    except OSError as error:
        raise ConfigError(f"tracking.prometheus.host: cannot listen at {host}: {error}") from error


def write_target(folder: Path, host: str, port: int, labels: dict[str, str]) -> Path | None:
    """The file for Prometheus; None where it cannot be written, which ends no daemon."""
    path = target_file(folder, labels["run"], labels["id"])
    reached_at = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    place = f"[{reached_at}]:{port}" if ":" in reached_at else f"{reached_at}:{port}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps([{"targets": [place], "labels": labels}]) + "\n")
    except OSError as error:
        log.warning("metrics: cannot write %s: %s", path, error)
        return None
    return path


@contextmanager
def exporting(config: RunConfig, role: str, daemon_id: str) -> Iterator[Exported]:
    """What the daemon exports is read at its endpoint until the block ends.

    Raises:
        ConfigError: `tracking.prometheus.host` is no address of this machine.
    """
    settings = config.tracking.prometheus
    is_left_out = role == "learner"
    exported = Exported(is_on=settings.enabled, left_out=("buffer_",) if is_left_out else ())
    if not settings.enabled:
        yield exported
        return
    labels = {"run": config.run.name, "role": role, "id": daemon_id}
    server = serve(settings, daemon_id, _registry(exported, config.run.path, labels))
    host, port = server.socket.getsockname()[:2]
    log.info("metrics at http://%s:%d/metrics", host, port)
    if not is_loopback(f"http://{host}:{port}"):
        log.warning("metrics: whoever reaches %s:%d can read them, without a key", host, port)
    target = write_target(config.run.folder, settings.host, port, labels)
    try:
        yield exported
        if target is not None:
            target.unlink(missing_ok=True)
    finally:
        server.shutdown()
        server.server_close()


def _registry(exported: Exported, run: Path, labels: Mapping[str, str]) -> "CollectorRegistry":
    """All families of a daemon, each sample with the daemon's labels."""
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

    unlabeled = CollectorRegistry()
    unlabeled.register(exported)
    ProcessCollector(registry=unlabeled)
    GCCollector(registry=unlabeled)
    unlabeled.register(_Machine(run))
    labeled = CollectorRegistry()
    labeled.register(_Labeled(unlabeled, labels))
    return labeled


class _Labeled:
    def __init__(self, registry: "CollectorRegistry", labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator["Metric"]:
        for metric in self._registry.collect():
            metric.samples = [
                s._replace(labels={**s.labels, **self._labels}) for s in metric.samples
            ]
            yield metric


class _Machine:
    """The disk that has the run's folder, and the release."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        disk = shutil.disk_usage(self._run)
        for name, value in (("free", disk.free), ("size", disk.total)):
            text = f"{name.capitalize()} bytes of the disk that has the run's folder."
            yield GaugeMetricFamily(f"{PREFIX}run_disk_{name}_bytes", text, value=value)
        version = {"version": streamrl.__version__}
        yield InfoMetricFamily(PREFIX.rstrip("_"), "The release of StreamRL.", value=version)
