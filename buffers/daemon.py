"""The buffer daemon (`streamrl buffer`): a ledger behind a socket.

    zmq://     payloads and journal are in the run's folder, and pass through the daemon
    redis://   both are in Redis; another daemon may take over from there

The daemon continues where its journal ends, and waits while the journal cannot be opened (a full
disk). It ends after a signal or, unless a launcher has started it, when the run has ended and every
generator has left. A launcher ends it after the others: a learner that is killed at its end is
started again and needs the buffer. If the launcher dies, all daemons drain; the buffer ends after
the others, which need it for that. At the end it writes its stats to `books.json` in the run's
folder.
"""

import argparse
import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from buffers.journal.journal import Journal
from buffers.journal.payload_segments import PayloadPlace
from buffers.journal.sqlite import SqliteStorage, journal_path
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.multipart import Frame
from buffers.zmq.server import ZmqBufferServer
from streamrl import service
from streamrl.config import RunConfig
from streamrl.config.addresses import places_of, require_port, url_host
from streamrl.config.loading.load import configuration
from streamrl.errors import (
    ConfigError,
    HandedOverError,
    StorageError,
    StreamRLError,
)
from streamrl.extras import require
from streamrl.run_folder import write_books
from streamrl.shutdown import Shutdown
from streamrl.tracking.prometheus import Exported, exporting, of_buffer
from streamrl.types import BufferStats, OverduePolicy

if TYPE_CHECKING:
    from buffers.redis.leadership import Leadership

Answer = TypeVar("Answer")
SIBLINGS_S, LATE_S = 0.2, 2.0

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    return service.run(partial(serve, config), role="buffer", config=config)


async def serve(config: RunConfig, shutdown: Shutdown) -> None:
    """Serve until the run is complete. Waits for the server's thread, which a signal stops."""
    stop = threading.Event()
    signaled = asyncio.create_task(_asked_to_stop(shutdown, service.force_s(config)))
    signaled.add_done_callback(lambda _: stop.set())
    of_storage = _serve_from_disk if config.buffer.binds_url else serve_from_redis
    with exporting(config, "buffer", "buffer") as exported:
        stats = await of_storage(config, stop, exported)
    signaled.cancel()
    if stats is not None:
        write_books(config, stats)


async def _serve_from_disk(
    config: RunConfig, stop: threading.Event, exported: Exported
) -> BufferStats | None:
    """`zmq://`: serve at the configured address, with the journal in the run's folder. None if
    stopped before the journal could be opened."""
    state: BufferState[Frame] = _blank(config)
    url = config.buffer.url
    require_port("buffer.url", url)
    with contextlib.ExitStack() as stack:
        open_journal = (
            partial(_open_journal, config, state, stack) if config.buffer.journal else None
        )
        with service.binding("buffer.url", url):
            server = await asyncio.to_thread(_server, config, state, url, open_journal, exported)
        log.info("serving at %s", server.url)
        return await asyncio.to_thread(server.serve, stop, until_complete=not service.is_launched())


async def serve_from_redis(
    config: RunConfig, stop: threading.Event, exported: Exported
) -> BufferStats | None:
    """`redis://`: serve at an address announced in Redis, once no other daemon serves the run.
    Starts again from what Redis has if another daemon has taken over, or Redis has lost something.
    None if stopped before it served."""
    require("buffer.url: redis://", "redis")
    from buffers.redis.leadership import Leadership

    url, run = config.buffer.secret_url, config.run.name
    leadership = Leadership(url, run, deadline_s=config.buffer.deadline_s)
    try:
        while not stop.is_set():
            term = await _unless(stop, leadership.acquire())
            if term is None:
                break
            try:
                return await _serve_term(config, term, leadership, stop, exported)
            except HandedOverError as error:
                log.warning("%s", error)
        return None
    finally:
        # If Redis does not answer, the entry expires by itself.
        with contextlib.suppress(StreamRLError, TimeoutError):
            async with asyncio.timeout(LATE_S):
                await leadership.resign()
        await leadership.close()


async def _serve_term(
    config: RunConfig,
    term: str,
    leadership: "Leadership",
    stop: threading.Event,
    exported: Exported,
) -> BufferStats | None:
    """Serve as long as this daemon's term lasts. None if stopped before Redis gave the journal.

    Raises:
        HandedOverError: the journal is not as this daemon left it.
    """
    from buffers.redis.journal_storage import RedisStorage

    ended = threading.Event()
    state: BufferState[Frame] = _blank(config)
    storage = RedisStorage(config.buffer.secret_url, config.run.name, term)
    journal: Journal[bytes] = Journal(storage, state)
    renewing = asyncio.create_task(leadership.renew())
    try:
        url, open_journal = address_beside(config.buffer.url), partial(_recovered, journal, config)
        server = await asyncio.to_thread(_server, config, state, url, open_journal, exported)
        serve = partial(server.serve, ended, until_complete=not service.is_launched())
        serving = asyncio.create_task(asyncio.to_thread(serve))
        try:
            await _unless(stop, leadership.announce(server.url, server.key))
            log.info("serving at %s", server.url)
            while not (serving.done() or renewing.done() or stop.is_set()):
                waits = {serving, renewing}
                await asyncio.wait(waits, timeout=SIBLINGS_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The journal is closed after its last use.
            ended.set()
            stats = await serving
        if renewing.done():
            renewing.result()
        return stats
    finally:
        # Repeatedly: a Redis client that is just connecting may lose a cancellation.
        while not renewing.done():
            renewing.cancel()
            await asyncio.wait({renewing}, timeout=SIBLINGS_S)
        # Both tasks may have found that another daemon has taken over.
        await asyncio.gather(renewing, return_exceptions=True)
        await asyncio.to_thread(journal.close)


def _recovered(journal: Journal[Any], config: RunConfig, now_s: float) -> Journal[Any]:
    journal.recover(_identity(config), now_s)
    return journal


def address_beside(url: str) -> str:
    """Any free port at the local address from which this machine reaches the Redis of the URL."""
    host, port = next(places_of(url))
    try:
        found = socket.getaddrinfo(host, int(port or 1), type=socket.SOCK_DGRAM)
        family, kind, *_, address = found[0]
        with socket.socket(family, kind) as probe:
            # Connecting a UDP socket sends nothing: it only chooses a route.
            probe.connect(address)
            return f"zmq://{url_host(probe.getsockname()[0])}:0"
    except OSError as error:
        raise ConfigError(f"buffer.url: {host} cannot be reached: {error}") from error


async def _unless(stop: threading.Event, call: Coroutine[Any, Any, Answer]) -> Answer | None:
    """The call's result; None once `stop` is set, which is polled every SIBLINGS_S."""
    task = asyncio.create_task(call)
    while not task.done():
        await asyncio.wait({task}, timeout=SIBLINGS_S)
        if stop.is_set():
            task.cancel()
            return None
    return task.result()


def _blank(config: RunConfig) -> BufferState[Frame]:
    ledger = Ledger(
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.buffer.largest_staleness,
        min_staleness=config.buffer.smallest_staleness,
        overdue=OverduePolicy(config.buffer.overdue),
        final_version=config.run.max_steps,
    )
    ttl_s, name = config.buffer.lease_ttl_s, config.run.name
    return BufferState(ledger, lease_ttl_s=ttl_s, run_name=name)


def _server(
    config: RunConfig,
    state: BufferState[Frame],
    url: str,
    open_journal: Callable[[float], Journal[Any]] | None,
    exported: Exported,
) -> ZmqBufferServer:
    return ZmqBufferServer(
        state,
        url,
        quarantine=config.run.path / "quarantine",
        open_journal=open_journal,
        curve=config.buffer.curve,
        max_group_bytes=config.buffer.max_group_bytes,
        stores_elsewhere=not config.buffer.binds_url,
        on_stats=(lambda stats: exported.show("stats", lambda: of_buffer(stats)))
        if exported.is_on
        else None,
    )


async def _asked_to_stop(shutdown: Shutdown, others_s: float) -> None:
    """Waits for a signal, or for the end of the launcher and then, at most `others_s`, of its other
    processes. Polls, since only a parent is notified."""
    await shutdown.requested.wait()
    if service.launcher_has_ended():
        shutdown.allow(2 * LATE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(others_s + LATE_S):
                while service.has_siblings():  # noqa: ASYNC110
                    await asyncio.sleep(SIBLINGS_S)


def _open_journal(
    config: RunConfig, state: BufferState[Frame], stack: contextlib.ExitStack, now_s: float
) -> Journal[PayloadPlace]:
    """Open the journal; `stack` closes it."""
    path, durability = journal_path(config.run.path), config.buffer.durability
    journal = Journal(SqliteStorage(path, durability=durability), state)
    try:
        _recovered(journal, config, now_s)
    except StorageError:
        journal.close()
        raise
    stack.callback(journal.close)
    return journal


def _identity(config: RunConfig) -> dict[str, str | int]:
    """What identifies the run that a journal belongs to."""
    return {
        "run.name": config.run.name,
        "run.seed": config.run.seed,
        "data.source": ", ".join(source.path for source in config.data.sources),
        "learner.groups_per_step": config.learner.groups_per_step,
        "buffer.max_staleness": config.buffer.largest_staleness,
    }
