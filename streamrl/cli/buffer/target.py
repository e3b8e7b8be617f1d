"""Finds the buffer that a command names, by its run or by the URL of a run's buffer server.

Nothing here attaches, so no command fences a learner. No command waits for the buffer of a run that
has ended by its folder.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from buffers.connect import connect, try_stats
from buffers.zmq.client import ZmqBuffer
from streamrl.config import RunConfig
from streamrl.config.addresses import is_port, places_of
from streamrl.config.secrets import hide_password
from streamrl.diagnosis import Reading
from streamrl.diagnosis.reading import RunState, outcome, startup_s, state_of
from streamrl.errors import ConfigError, StreamRLError, TransportError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import (
    ended_launch,
    find_config,
    is_launched_since,
    launched_s,
    read_learner,
)
from streamrl.types import BufferStats

_DEADLINE_S = 10.0
_PROBE_S = 2.0


def find_target(target: str) -> RunConfig | str:
    """The configuration of a run, or the URL of a server of one run.

    Raises:
        ConfigError: the target names no run, or may name several.
    """
    if "://" not in target:
        return find_config(target)
    if not target.startswith("zmq://"):
        raise ConfigError(
            f"{hide_password(target)[0]} names no run: give the configuration, such as "
            "runs/NAME/config.yaml"
        )
    if _place(target) is None:
        raise ConfigError(f"{target}: must be zmq://host:port, with a port from 1 to 65535")
    return target


@asynccontextmanager
async def open_running(target: str) -> AsyncIterator[TrajectoryBuffer]:
    """A client of a running buffer, or of one that may still answer; closed when the block ends.

    Raises:
        StreamRLError: the run has ended; the message says how and at which step.
        TransportError: nothing listens where its buffer should be.
    """
    found = find_target(target)
    if isinstance(found, RunConfig):
        await _require_running(found)
        deadline_s = min(_DEADLINE_S, found.buffer.deadline_s)
        found = found.with_values(buffer={"deadline_s": deadline_s})
    elif not await _is_listening(found):
        raise TransportError(_absence(found))
    async with _client(found) as client:
        try:
            yield client
        except TransportError:
            # The run may have ended while the command waited.
            if isinstance(found, RunConfig):
                await _require_running(found)
            raise


async def _require_running(config: RunConfig) -> None:
    reading = read_folder(config)
    state = state_of(reading)
    is_over = state is RunState.FINISHED or (
        state is not RunState.RUNNING and not await _is_listening(config.buffer.url)
    )
    if is_over:
        how = outcome(reading) or "no learner has reported, and nothing listens at buffer.url"
        raise StreamRLError(f"no buffer of {config.run.path} is running: {how}")


async def read_stats(found: RunConfig | str) -> tuple[BufferStats | None, str]:
    """Return the buffer's stats, or why there are none. Waits a few seconds for the buffer."""
    url = found if isinstance(found, str) else found.buffer.url
    if not await _is_listening(url):
        return None, _absence(url)
    async with _client(found) as buffer:
        return await try_stats(buffer)


@asynccontextmanager
async def _client(found: RunConfig | str) -> AsyncIterator[TrajectoryBuffer]:
    if isinstance(found, RunConfig):
        buffer = connect(found)
    else:
        buffer = ZmqBuffer(found, deadline_s=_DEADLINE_S)
    try:
        yield buffer
    finally:
        await buffer.close()


def _absence(url: str) -> str:
    return f"nothing listens at {url}: the buffer is not running"


def read_folder(config: RunConfig) -> Reading:
    """A reading from the run's folder alone."""
    folder = config.run.path
    learner, ended = read_learner(folder), ended_launch(folder)
    return Reading(
        stall_s=config.run.stall_s,
        stats=None,
        learner=learner,
        learner_age_s=0.0 if learner is None else max(0.0, time.time() - learner.time_s),
        is_relaunched=learner is not None
        and ended is None
        and is_launched_since(folder, learner.time_s),
        is_launch_over=ended is not None,
        failure="" if ended is None else ended.failure,
        max_steps=config.run.max_steps,
        launched_s=launched_s(folder),
        startup_s=startup_s(config),
    )


def _place(url: str) -> tuple[str, int] | None:
    """Return host and port; None if the URL lacks one of them, or names several places."""
    (host, port), *others = places_of(url)
    is_one = host and not others and is_port(port) and int(port) > 0
    return (host, int(port)) if is_one else None


async def _is_listening(url: str) -> bool:
    """Whether a process accepts connections at the URL; true if the address cannot be tried.

    Waits at most _PROBE_S; after that it counts as true, since the network may be slow.
    """
    place = _place(url)
    if place is None:
        return True
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(*place)
    except TimeoutError:
        return True
    except (OSError, UnicodeError):
        # UnicodeError is the resolver's error for a name with an empty or overlong label.
        return False
    writer.close()
    return True
