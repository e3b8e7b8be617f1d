"""`books.json`: the last reading of a run's books, in its folder.

The buffer daemon writes it as it ends. Where there is none (`redis://`), `streamrl launch` calls
`streamrl books` after everybody has left, and before a new run, so that no run meets what an older
one of its name has left on the server.
"""

import argparse
import asyncio
import contextlib

from buffers.connect import connect
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError, OtherReleaseError
from streamrl.run_folder import write_books
from streamrl.types import BufferStats


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.has_daemon:
        raise ConfigError("the buffer daemon writes books.json as it ends")
    asyncio.run(run(config, arguments))
    return 0


async def run(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Write the books, or what the arguments ask for instead."""
    if arguments.forget:
        await _forget(config)
        return
    stats = await _read(config)
    if not arguments.require_none:
        write_books(config, stats)
    elif stats.books.learner_term:
        raise ConfigError(
            f"run.name: the buffer holds a run {config.run.name} at version "
            f"{stats.policy_version} already: --resume goes on with it, --new (or streamrl books "
            "--forget) deletes it there, or choose another run.name"
        )


async def _forget(config: RunConfig) -> None:
    from buffers.redis.events import forget

    at_work = ""
    # What another release wrote cannot be read, and is deleted all the same.
    with contextlib.suppress(OtherReleaseError):
        stats = await _read(config)
        at_work = ", ".join(status.generator_id for status in stats.generators)
    if at_work:
        raise ConfigError(
            f"run.name: generators of a run {config.run.name} are at work at this buffer "
            f"({at_work}), or were until a moment ago: choose another run.name, or stop them and "
            f"wait buffer.lease_ttl_s ({config.buffer.lease_ttl_s:g} s)"
        )
    await forget(config.buffer.url, config.run.name)


async def _read(config: RunConfig) -> BufferStats:
    buffer = connect(config)
    try:
        return await buffer.stats()
    finally:
        await buffer.close()
