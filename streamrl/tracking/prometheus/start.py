"""The metrics of a daemon while it runs, if `tracking.prometheus` asks for them.

prometheus-client is imported only then.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import streamrl
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.tracking.prometheus.endpoint import Endpoint
from streamrl.tracking.prometheus.exported import PREFIX, Exported
from streamrl.tracking.prometheus.targets import listen, write_target

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)


@contextmanager
def exporting(config: RunConfig, role: str, daemon_id: str) -> Iterator[Exported]:
    """What the daemon exports is read at its endpoint until the block ends.

    Raises:
        ConfigError: `tracking.prometheus.host` is no address of this machine.
    """
    settings = config.tracking.prometheus
    is_left_out = role == "learner" and config.buffer.has_daemon
    exported = Exported(is_on=settings.enabled, left_out=("buffer_",) if is_left_out else ())
    if not settings.enabled:
        yield exported
        return
    labels = {"run": config.run.name, "role": role, "id": daemon_id}
    page = _Page(exported, config.run.path, labels)
    endpoint = Endpoint(listen(settings, daemon_id), page.render)
    host, port = endpoint.address
    log.info("metrics at http://%s:%d/metrics", host, port)
    if not is_loopback(f"http://{host}:{port}"):
        log.warning("metrics: whoever reaches %s:%d can read them, without a key", host, port)
    target = write_target(config.run.folder, settings.host, port, labels)
    try:
        yield exported
        if target is not None:
            target.unlink(missing_ok=True)
    finally:
        endpoint.close()


class _Page:
    """All families of a daemon, each sample with the daemon's labels."""

    def __init__(self, exported: Exported, run: Path, labels: Mapping[str, str]) -> None:
        from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

        self._run = run
        self._labels = labels
        none = CollectorRegistry()
        self._collectors = (exported, ProcessCollector(registry=none), GCCollector(registry=none))

    def render(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> Iterator["Metric"]:
        """What prometheus-client asks a registry for."""
        for collector in self._collectors:
            for metric in collector.collect():
                yield self._labeled(metric)
        for metric in self._of_machine():
            yield self._labeled(metric)

    def _labeled(self, metric: "Metric") -> "Metric":
        metric.samples = [
            sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples
        ]
        return metric

    def _of_machine(self) -> Iterator["Metric"]:
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        disk = shutil.disk_usage(self._run)
        for name, value in (("free", disk.free), ("size", disk.total)):
            text = f"{name.capitalize()} bytes of the disk that has the run's folder."
            yield GaugeMetricFamily(f"{PREFIX}run_disk_{name}_bytes", text, value=value)
        version = {"version": streamrl.__version__}
        yield InfoMetricFamily(PREFIX.rstrip("_"), "The release of StreamRL.", value=version)
