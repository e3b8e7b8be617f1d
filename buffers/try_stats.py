"""A reading of a buffer that may not answer: its account, or why there is none, within ANSWER_S.

For those who explain a standstill and must not become part of it: the learner's status reporter and
`streamrl status`.
"""

import asyncio

from streamrl.errors import StreamRLError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import BufferStats

ANSWER_S = 5.0


async def try_stats(buffer: TrajectoryBuffer) -> tuple[BufferStats | None, str]:
    """The buffer's reading and "", or None and a sentence. Waits ANSWER_S at most."""
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
