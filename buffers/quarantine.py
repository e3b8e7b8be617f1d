"""Where malformed messages are kept, for a person to look at. Called by backends."""

import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)


def keep(folder: Path, lease_id: str, payload: bytes, error: Exception) -> None:
    """One file per message; its name tells when and under which lease it came."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in lease_id)
    path = folder / f"{time.time_ns()}-{name}.msgpack"
    path.write_bytes(payload)
    log.warning("malformed group of lease %s kept in %s: %s", lease_id, path, error)
