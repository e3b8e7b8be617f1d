"""From a URL to a buffer client: the only place where a backend is chosen.

A new backend implements `streamrl.interfaces.TrajectoryBuffer`, passes `tests/contract`, and has a
case in `connect`.
"""

import asyncio

from streamrl.config import RunConfig
from streamrl.errors import StreamRLError
from streamrl.extras import require
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import BufferStats

ANSWER_S = 5.0


def connect(config: RunConfig) -> TrajectoryBuffer:
    """A client of the run's buffer at `buffer.url`; call it in the event loop that will use it."""
    settings = config.buffer
    match settings.url.partition("://")[0]:
        case "zmq":
            from buffers.zmq.client import ZmqBuffer

            return ZmqBuffer(
                settings.url,
                deadline_s=settings.deadline_s,
                curve=settings.curve,
                final_version=config.run.max_steps,
                run_name=config.run.name,
            )
        case _:
            require("buffer.url: redis://", "redis")
            from buffers.redis.client import RedisBuffer

            return RedisBuffer(
                settings.secret_url,
                config.run.name,
                deadline_s=settings.deadline_s,
                final_version=config.run.max_steps,
                max_group_bytes=settings.max_group_bytes,
                quarantine=config.run.path / "quarantine",
            )


async def try_stats(buffer: TrajectoryBuffer) -> tuple[BufferStats | None, str]:
    """The buffer's stats and "", or None and why there are none, for callers that explain why a run
    stalls. Waits at most ANSWER_S."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await buffer.stats(), ""
    except TimeoutError:
        return None, (
            f"the buffer has not answered for {ANSWER_S:g} s: is it running, and is buffer.url "
            "right?"
        )
    except StreamRLError as error:
        return None, str(error)
