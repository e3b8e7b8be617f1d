"""The buffer that a command is given: by a configuration or its file, or by the URL of a server of
one run.

Nothing here attaches, so that no command fences a learner.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from buffers.connect import connect
from buffers.zmq.client import ZmqBuffer
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.interfaces import TrajectoryBuffer

_DEADLINE_S = 10.0


@asynccontextmanager
async def open_buffer(target: str | RunConfig) -> AsyncIterator[TrajectoryBuffer]:
    """A client, closed when the block ends.

    Raises:
        ConfigError: the target names no run, or several.
    """
    buffer = _client(target)
    try:
        yield buffer
    finally:
        await buffer.close()


def _client(target: str | RunConfig) -> TrajectoryBuffer:
    if isinstance(target, RunConfig):
        return connect(target)
    if "://" not in target:
        return connect(load_config(target).config)
    if not target.startswith("zmq://"):
        raise ConfigError(
            f"{target} names no run: give the configuration, such as runs/NAME/config.yaml"
        )
    return ZmqBuffer(target, deadline_s=_DEADLINE_S)
