"""The stats of a buffer that may not answer, or the reason why there are none, within ANSWER_S.

For callers that explain why a run stands still, and must not wait themselves.
"""

import asyncio

from streamrl.errors import StreamRLError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import BufferStats

ANSWER_S = 5.0


async def try_stats(buffer: TrajectoryBuffer) -> tuple[BufferStats | None, str]:
    """The stats and "", or None and the reason as a sentence. Waits ANSWER_S at most."""
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
