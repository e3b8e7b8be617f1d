"""How Prometheus finds a daemon: its port, and a file of service discovery beside the run folders.

`file_sd_configs` reads runs/.prometheus/*.json, a file NAME@ID.json for each daemon of each run. A
launch removes those of its run, a daemon that ends as it should its own; that of one that was
killed stays, so that Prometheus shows that it is gone.
"""

import json
import logging
import re
import socket
from pathlib import Path

from streamrl.config.tracking import PrometheusSettings
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.run_folder import target_file

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


def listen(settings: PrometheusSettings, daemon_id: str) -> socket.socket:
    """A socket at the daemon's port, or at a free one where another process has it.

    Raises:
        ConfigError: this machine has no such address.
    """
    host, port = settings.host, port_of(settings, daemon_id)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(place)
        except OSError as error:
            if not port:
                raise
            log.warning(
                "metrics: cannot listen at %s:%d: %s; taking a free port", host, port, error
            )
            bound.bind((place[0], 0, *place[2:]))
    except OSError as error:
        raise ConfigError(f"tracking.prometheus.host: cannot listen at {host}: {error}") from error
    return bound


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
