"""`books.json`: the last reading of a run's books, in its folder.

The buffer daemon writes it as it ends. Where there is none (`redis://`), `streamrl launch` calls
`streamrl books` after everybody has left, and before a new run, so that no run meets what an older
one of its name has left on the server.
"""

import argparse
import asyncio
import json
import logging

import msgspec

from buffers.connect import connect, require_redis
from streamrl.cli.arguments import configuration
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import BufferStats

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.has_daemon:
        raise ConfigError("the buffer daemon writes books.json as it ends")
    asyncio.run(_run(config, arguments))
    return 0


async def _run(config: RunConfig, arguments: argparse.Namespace) -> None:
    if arguments.forget:
        require_redis()
        from buffers.redis_history import forget

        await forget(config.buffer.url, config.run.name)
        return
    stats = await _read(config)
    if not arguments.require_none:
        write_books(config, stats)
    elif stats.books.epoch:
        raise ConfigError(
            f"run.name: the buffer holds a run {config.run.name} at version "
            f"{stats.policy_version} already: --resume goes on with it, --new (or streamrl books "
            "--forget) deletes it there, or choose another run.name"
        )


async def _read(config: RunConfig) -> BufferStats:
    buffer = connect(config)
    try:
        return await buffer.stats()
    finally:
        await buffer.close()


def write_books(config: RunConfig, stats: BufferStats) -> None:
    """All but the list of open sequences, which is a learner's business."""
    books = msgspec.to_builtins(stats.books, str_keys=True)
    kept = {key: value for key, value in books.items() if key != "open_sequences"}
    path = config.run.path / "books.json"
    path.write_text(json.dumps({**kept, "balanced": stats.books.balanced}, indent=1) + "\n")
    log.info("books: %s", kept)
