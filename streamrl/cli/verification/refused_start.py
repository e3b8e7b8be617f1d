"""A learner that is started anew, without `--resume`, on the buffer of a run; it has to refuse.

Waits for the process to end, and kills one that does not: it has taken the run over.
"""

import asyncio
from collections.abc import Sequence

from streamrl.cli.processes.command import executable

NOT_ENDED = -1


async def refused_start(arguments: Sequence[str], deadline_s: float) -> tuple[int, str]:
    """Exit code and last line of `streamrl` with these arguments of a learner; NOT_ENDED for one
    that still runs at the deadline."""
    process = await asyncio.create_subprocess_exec(
        *(executable(), *arguments, "--set", "run.resume=never"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await process.communicate()
    except TimeoutError:
        return NOT_ENDED, f"it still runs after {deadline_s:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode(errors="replace").splitlines()
    return process.returncode or 0, lines[-1] if lines else ""
