"""`streamrl buffer books`: whether Redis holds a run, or that it is to hold none.

`streamrl launch` runs it before a new run, so that a run does not find what an older one of its
name has left on the server. (The buffer daemon writes `books.json` as it ends.)
"""

import argparse
import asyncio

from streamrl.checkpoints.find import require_new_run
from streamrl.config import RunConfig
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError
from streamrl.extras import require

DEADLINE_S = 5.0


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.binds_url:
        raise ConfigError(
            f"buffer.url: was {config.buffer.url!r}: the run is in its folder; to start anew, "
            "streamrl launch --new moves it aside"
        )
    require("buffer.url: redis://", "redis")
    asyncio.run(_forget(config) if arguments.forget else _require_none(config))
    return 0


async def _require_none(config: RunConfig) -> None:
    from buffers.redis.storage import read_snapshot

    deadline_s = _deadline_s(config)
    url, run = config.buffer.secret_url, config.run.name
    snapshot = await read_snapshot(url, run, deadline_s=deadline_s)
    require_new_run(config, snapshot.learner_term, snapshot.version)


async def _forget(config: RunConfig) -> None:
    from buffers.redis.leadership import served_at
    from buffers.redis.storage import forget

    url, run, deadline_s = config.buffer.secret_url, config.run.name, _deadline_s(config)
    if (server := await served_at(url, run, deadline_s=deadline_s)) is not None:
        raise ConfigError(
            f"run.name: a buffer daemon serves a run {run} at {server}, or did until a moment ago: "
            "choose another run.name, or stop it and try again"
        )
    await forget(url, run, deadline_s=deadline_s)


def _deadline_s(config: RunConfig) -> float:
    """A person waits: a server that does not run is reported, not waited for."""
    return min(config.buffer.deadline_s, DEADLINE_S)
