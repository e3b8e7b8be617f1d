"""The buffer daemon (`streamrl buffer`): a ledger behind a socket.

It continues where its journal ends, and waits while that cannot be opened (a full disk). It ends
after a signal, or when the run is complete: the run has ended and every generator has left. When
its launcher has ended, so that all daemons drain, it ends after the others, which need it for that.
It writes the last stats to `books.json` in the run's folder.
"""

import argparse
import asyncio
import contextlib
import logging
import threading
import time
from functools import partial

from buffers.journal.journal import Journal, journal_path
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.multipart import Frame
from buffers.zmq.server import ZmqBufferServer, wait_for_journal
from streamrl import service
from streamrl.config import RunConfig
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError, StorageError
from streamrl.run_folder import write_books
from streamrl.shutdown import Shutdown
from streamrl.tracking.prometheus import Exported, exporting
from streamrl.tracking.prometheus.readings import of_buffer
from streamrl.types import OverduePolicy

SIBLINGS_S, LATE_S = 0.2, 2.0

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    return service.run(partial(serve, config), role="buffer", config=config)


async def serve(config: RunConfig, shutdown: Shutdown) -> None:
    """Serve until the run is complete. Waits for the server's thread, which a signal stops."""
    with exporting(config, "buffer", "buffer") as exported:
        await _serve(config, shutdown, exported)


async def _serve(config: RunConfig, shutdown: Shutdown, exported: Exported) -> None:
    if not config.buffer.url.startswith("zmq://"):
        scheme = config.buffer.url.partition("://")[0]
        raise ConfigError(f"buffer.url: a buffer at {scheme}:// needs no daemon")
    ledger = Ledger(
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.buffer.max_staleness,
        overdue=OverduePolicy(config.buffer.overdue),
        final_version=config.run.max_steps,
    )
    state = BufferState[Frame](ledger, lease_ttl_s=config.buffer.lease_ttl_s)
    stop = threading.Event()
    signaled = asyncio.create_task(_asked_to_stop(shutdown, service.force_s(config)))
    signaled.add_done_callback(lambda _: stop.set())
    with service.binding("buffer.url", config.buffer.url):
        journal = await _wait_for_journal(config, state, stop)
        if journal is None and config.buffer.journal:
            return
        server = ZmqBufferServer(
            state,
            config.buffer.url,
            quarantine=config.run.path / "quarantine",
            journal=journal,
            curve=config.buffer.curve,
            max_group_bytes=config.buffer.max_group_bytes,
            on_stats=(lambda stats: exported.show("stats", lambda: of_buffer(stats)))
            if exported.is_on
            else None,
        )
    log.info("serving at %s", server.url)
    stats = await asyncio.to_thread(server.serve, stop, until_complete=True)
    signaled.cancel()
    if journal is not None:
        journal.close()
    write_books(config, stats)


async def _asked_to_stop(shutdown: Shutdown, others_s: float) -> None:
    """Waits for a signal, or for the end of the launcher and of what it has started, which takes
    `others_s` at most. Polls, since only a parent is told."""
    await shutdown.requested.wait()
    if service.launcher_has_ended():
        shutdown.allow(2 * LATE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(others_s + LATE_S):
                while service.has_siblings():  # noqa: ASYNC110
                    await asyncio.sleep(SIBLINGS_S)


async def _wait_for_journal(
    config: RunConfig, state: BufferState[Frame], stop: threading.Event
) -> Journal | None:
    """None if it has none, or once `stop` is set."""
    if not config.buffer.journal:
        return None
    url, curve = config.buffer.url, config.buffer.curve
    open_journal = partial(_open_journal, config, state)
    return await asyncio.to_thread(wait_for_journal, open_journal, url, curve, stop)


def _open_journal(config: RunConfig, state: BufferState[Frame]) -> Journal:
    journal = Journal(journal_path(config.run.path), state, durability=config.buffer.durability)
    settings: dict[str, str | int] = {
        "run.name": config.run.name,
        "run.seed": config.run.seed,
        "data.source": ", ".join(source.path for source in config.data.sources),
        "learner.groups_per_step": config.learner.groups_per_step,
        "buffer.max_staleness": config.buffer.max_staleness,
    }
    try:
        journal.recover(settings, time.monotonic())
    except StorageError:
        journal.close()
        raise
    return journal
