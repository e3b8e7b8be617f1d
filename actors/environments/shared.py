"""What the siblings of a group share: an environment's own `open_group`, if it has one.

A class method that takes the context and returns an asynchronous context manager; what that yields
is `context.shared` of each sibling.

Invariant: it is opened once before the first sibling starts and closed once after the last one was
closed, however they ended.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from actors.episodes.closing import ClosedAfter
from actors.episodes.deadline import Deadline, DeadlineError
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext
from streamrl.user_code import attributed_to, is_user_code, load_user_code


@asynccontextmanager
async def open_group(
    entry: EnvironmentEntry, context: EnvironmentContext, *, deadline_s: float
) -> AsyncIterator[object]:
    """Around a group of the entry. Waits until it is open; `generator.group_deadline_s` unblocks.

    Raises:
        RolloutError: it cannot be opened or closed.
    """
    name = entry.environment
    own = load_user_code(entry.setting, name) if is_user_code(name) else None
    opened = getattr(own, "open_group", None)
    if opened is None:
        yield None
        return
    attributed = partial(attributed_to, f"environment {name}: open_group", RolloutError)
    try:
        with Deadline(deadline_s), attributed():
            manager = opened(context)
            shared = await manager.__aenter__()
    except DeadlineError as error:
        raise RolloutError(
            f"environment {name}: open_group has not opened within generator.group_deadline_s, "
            f"which is {deadline_s:g} s"
        ) from error

    async def close() -> None:
        with attributed():
            await manager.__aexit__(None, None, None)

    async with ClosedAfter(close):
        yield shared
