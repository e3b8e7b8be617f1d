"""Metrics of a daemon for Prometheus: its newest readings as metric families, and the server.

Invariant: one thread of the daemon writes, any thread reads. The writer replaces whole mappings and
changes none, so a reader sees the old or the new one, and neither waits.

families.csv maps names of metrics.jsonl to names of Prometheus; all others follow a rule: names
begin with `streamrl_`, units are seconds, bytes and ratios, and counters end with `_total`:
`learner/grad_norm` is `streamrl_learner_grad_norm`. What a generator reports about itself is
`self/...`; what the buffer knows about it is `generator/ID/...`.

Prometheus finds a daemon by a service discovery file beside the run folders,
runs/.prometheus/NAME@ID.json. A launch removes the files of its run, and a daemon that ends
normally removes its own. The file of a killed daemon stays, so Prometheus shows that it is down.
prometheus-client is imported only if it is used.
"""

import csv
import json
import logging
import math
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import streamrl
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback, url_host
from streamrl.config.tracking import PrometheusSettings
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.interfaces import Tracker
from streamrl.metrics import (
    OWN,
    STALENESS_BUCKETS,
    STALENESS_EDGES,
    books_metrics,
    buffer_metrics,
    find,
    generator_metrics,
)
from streamrl.run_folder import target_file
from streamrl.types import (
    BufferStats,
    GeneratorStatus,
    LearnerActivity,
    LearnerStatus,
    ValidatorStatus,
)

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

log = logging.getLogger(__name__)

PREFIX = "streamrl_"
_BOUNDS = (*map(str, STALENESS_EDGES), "+Inf")
_NUM_GROUPS = [f"buffer/staleness_{bucket}/num_groups" for bucket in STALENESS_BUCKETS]


Kind: TypeAlias = Literal["gauge", "counter", "sum", "histogram"]
"""`counter`: already a running total; `sum`: a value per step, added up here; `histogram`: the
same, by bucket."""


class Family(NamedTuple):
    """A metric as Prometheus knows it; `name` lacks the prefix and a counter's `_total`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[tuple[str, str], ...] = ()


_TEXT = (resources.files("streamrl.tracking") / "families.csv").read_text(encoding="utf-8")
ROWS = tuple(csv.DictReader(_TEXT.splitlines()))
"""A row's pattern matches a metric's whole name. Its named groups are labels; its unnamed group
replaces `{}` in the family."""
_PATTERNS = tuple((re.compile(row["pattern"]), row) for row in ROWS)
_UNITS = (
    ("_per_s", "_per_second"),
    ("_s", "_seconds"),
    ("_frac", "_ratio"),
    ("_fraction", "_ratio"),
)


@lru_cache(maxsize=2**14)
def family_of(metric: str) -> Family:
    """The family of a metric of metrics.jsonl, or of a reading of this module."""
    for pattern, row in _PATTERNS:
        if found := pattern.fullmatch(metric):
            named = pattern.groupindex.values()
            words = (found[n] for n in range(1, pattern.groups + 1) if n not in named)
            labels = tuple(sorted(found.groupdict().items()))
            name = _name(row["family"].format(*words))
            return Family(name, cast(Kind, row["kind"]), row["text"], labels)
    known = find(metric)
    text = f"{metric} of metrics.jsonl, of the last step." if known is OWN else known.meaning
    return Family(_name(metric), "gauge", text)


def _name(words: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_]", "_", words)
    for suffix, unit in _UNITS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit
    return name


class Exported(Tracker):
    """What one daemon exports. `is_on` says whether there is an endpoint to read it.

    Families whose names begin with one of `left_out` are left to another daemon.
    """

    def __init__(self, *, is_on: bool, left_out: Sequence[str] = ()) -> None:
        self.is_on = is_on
        self._left_out = tuple(left_out)
        self._newest: Mapping[str, Mapping[str, float]] = {}
        self._sums: Mapping[str, float] = {}

    def show(self, source: str, metrics: Callable[[], Mapping[str, Any]]) -> None:
        """Replace the last reading of this source; `metrics` is called only if `is_on`."""
        if self.is_on:
            self._newest = {**self._newest, source: _numbers(metrics())}

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Take the line of a step; metrics that count something are added up."""
        if not self.is_on:
            return
        # The learner's status has the version, too, and has it sooner.
        line = {k: v for k, v in _numbers(metrics).items() if k != "learner/policy_version"}
        kinds = {name: family_of(name).kind for name in line}
        added = {name: line.pop(name) for name, k in kinds.items() if k in ("sum", "histogram")}
        num_groups = sum(added.get(name, 0.0) for name in _NUM_GROUPS)
        added["buffer/staleness_sum"] = num_groups * line.get("buffer/staleness_mean", 0.0)
        sums = {name: self._sums.get(name, 0.0) + value for name, value in added.items()}
        steps = self._sums.get("learner/num_steps", 0.0) + 1
        self._sums = {**self._sums, **sums, "learner/num_steps": steps}
        # Only one step's line contains a validation, so its values are kept.
        scores = {k: v for k, v in self._newest.get("line", {}).items() if "validation/" in k}
        self._newest = {**self._newest, "line": {**scores, **line}}

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self.show("validation", lambda: metrics)

    def collect(self) -> Iterator["Metric"]:
        """Yield families with their samples, as prometheus-client expects of a collector."""
        newest = {k: v for reading in self._newest.values() for k, v in reading.items()}
        # By labels: a-b and a_b get one name here, and Prometheus accepts one value per series.
        families: dict[str, dict[tuple[tuple[str, str], ...], tuple[Family, float]]] = {}
        for metric, value in {**newest, **self._sums}.items():
            family = family_of(metric)
            if not family.name.startswith(self._left_out or ("-",)):
                families.setdefault(family.name, {})[family.labels] = (family, value)
        for name, found in families.items():
            yield _metric(name, found.values())


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _metric(name: str, found: Iterable[tuple[Family, float]]) -> "Metric":
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    samples = list(found)
    (family, _), *_ = samples
    labels = [label for label, _ in family.labels]
    if family.kind == "histogram":
        counts = {dict(f.labels).get("bucket", ""): value for f, value in samples}
        totals = [*accumulate(counts.get(bucket, 0.0) for bucket in STALENESS_BUCKETS)]
        buckets = list(zip(_BOUNDS, totals, strict=True))
        return HistogramMetricFamily(PREFIX + name, family.text, buckets, counts.get("", 0.0))
    of_kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = of_kind(PREFIX + name, family.text, labels=labels)
    for each, value in samples:
        metric.add_metric([text for _, text in each.labels], value)
    return metric


def of_buffer(stats: BufferStats) -> dict[str, float]:
    return {
        **books_metrics(stats.books),
        **buffer_metrics(stats),
        **generator_metrics(stats),
        "buffer/policy_version": stats.policy_version,
        "buffer/max_staleness_versions": stats.max_staleness,
        "buffer/is_refusing": bool(stats.refusal),
        "buffer/is_draining": stats.draining,
        "buffer/is_finished": stats.finished,
        "buffer/due_wait_s": stats.wait_due_s,
    }


def of_learner(status: LearnerStatus, config: RunConfig) -> dict[str, float]:
    return {
        **{
            f"learner/activity/{activity.name.lower()}": activity is status.activity
            for activity in LearnerActivity
        },
        "learner/activity_s": status.activity_s,
        "learner/policy_version": status.policy_version,
        "learner/max_steps": config.run.max_steps,
        "learner/max_staleness_versions": config.buffer.largest_staleness,
        "learner/stalls": status.num_stalls,
        "learner/cannot_save": bool(status.unsaved),
        "learner/checkpoint_every_steps": config.learner.checkpoint.every,
        "weights/num_receivers": status.num_receivers,
        "weights/num_behind": len(status.behind),
    }


def of_generator(status: GeneratorStatus) -> dict[str, float]:
    return {
        "self/policy_version": status.policy_version,
        "self/num_tokens": status.num_tokens,
        "self/tokens_per_s": status.tokens_per_s,
        "self/num_active": status.num_active,
        "self/num_waiting": status.num_waiting,
        "self/leases": len(status.lease_ids),
        "self/oldest_lease_s": max(status.lease_ages_s, default=0.0),
        "self/pause_s": status.pause_s,
        "self/busy_s": status.busy_s,
        "self/uptime_s": status.uptime_s,
        **({} if status.kv_usage is None else {"self/kv_usage_frac": status.kv_usage}),
        "self/is_catching_up": status.is_catching_up,
        "self/num_lost_agents": status.num_lost_agents,
        **{f"self/reward/{f.reward}/num_failures": f.num_failures for f in status.failed_rewards},
        "self/last_heartbeat_timestamp_seconds": time.time(),
    }


def of_validator(status: ValidatorStatus, num_tokens: float) -> dict[str, float]:
    """`num_tokens` is the number of tokens that its engine has sampled."""
    return {
        "validator/is_busy": status.is_busy,
        "validator/prompts": status.num_prompts,
        "validator/prompts_done": status.num_done,
        "validator/next_policy_version": status.next_version,
        "validator/sampled_tokens": num_tokens,
    }


_PLACES = {"buffer": 0, "learner": 1, "validator": 2}
_GENERATORS = 10


def endpoint_port(settings: PrometheusSettings, daemon_id: str) -> int:
    """The port that the setting gives this daemon; 0 means any free port.

    >>> endpoint_port(PrometheusSettings(port=9400), "generator-3")
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
    """Start prometheus-client's server at the daemon's port, or at a free one if another process
    has it. It answers each scrape in a separate thread.

    Raises:
        ConfigError: this machine has no such address.
    """
    from prometheus_client import start_http_server

    host, port = settings.host, endpoint_port(settings, daemon_id)
    for place in dict.fromkeys((port, 0)):
        try:
            return start_http_server(place, host, registry)[0]
        except OSError as error:
            failure = error
            if place:
                log.warning(
                    "metrics: cannot listen at %s:%d: %s; taking a free port", host, place, error
                )
    raise ConfigError(f"tracking.prometheus.host: cannot listen at {host}: {failure}") from failure


def write_target(folder: Path, host: str, port: int, labels: dict[str, str]) -> Path | None:
    """Write the service discovery file and return its path; None if it cannot be written, which is
    no reason to end the daemon."""
    path = target_file(folder, labels["run"], labels["id"])
    reached_at = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(
            path,
            json.dumps([{"targets": [f"{url_host(reached_at)}:{port}"], "labels": labels}]) + "\n",
        )
    except OSError as error:
        log.warning("metrics: cannot write %s: %s", path, error)
        return None
    return path


@contextmanager
def exporting(config: RunConfig, role: str, daemon_id: str) -> Iterator[Exported]:
    """Serve what the daemon exports until the block ends. Raises ConfigError if
    `tracking.prometheus.host` is no address of this machine."""
    settings = config.tracking.prometheus
    left_out = ("buffer_",) if role == "learner" else ()
    exported = Exported(is_on=settings.enabled, left_out=left_out)
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
    """Collects the free space of the run folder's disk, and the release. A `Gauge` would write its
    value to the folder named by PROMETHEUS_MULTIPROC_DIR, which servers of vLLM and SGLang read."""

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
