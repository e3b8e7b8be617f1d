"""Several coroutines at once, all of whose results are needed.

Invariant: none is left running. Called by: groups of episodes, rewards.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from streamrl.errors import RolloutError

T = TypeVar("T")


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error cancels the others and is raised."""
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* RolloutError as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]
