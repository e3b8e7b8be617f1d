"""`streamrl buffer books`: `books.json`, the last reading of a run's books, in its folder.

The buffer daemon writes it as it ends. Where there is none (`redis://`), `streamrl launch` runs
this command after the daemons have ended. It also runs it before a new run, so that a run does not
find what an older one of its name left on the server.
"""

import argparse
import asyncio
import contextlib

from streamrl.checkpoints.find import require_new_run
from streamrl.cli.buffer.target import open_buffer
from streamrl.config import RunConfig
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError, OtherReleaseError
from streamrl.run_folder import write_books
from streamrl.types import BufferStats

DEADLINE_S = 5.0


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.has_daemon:
        raise ConfigError("the buffer daemon writes books.json as it ends")
    # A person waits: a server that does not run is reported, not waited for.
    deadline_s = min(config.buffer.deadline_s, DEADLINE_S)
    buffer = config.buffer.model_copy(update={"deadline_s": deadline_s})
    asyncio.run(run(config.model_copy(update={"buffer": buffer}), arguments))
    return 0


async def run(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Write the books, or check that there are none, or delete them, as the arguments say."""
    if arguments.forget:
        await _forget(config)
        return
    stats = await _read(config)
    if not arguments.require_none:
        write_books(config, stats)
    else:
        require_new_run(config, stats)


async def _forget(config: RunConfig) -> None:
    from buffers.redis.events import forget

    reporting = ""
    # What another release wrote cannot be read, and is deleted all the same.
    with contextlib.suppress(OtherReleaseError):
        stats = await _read(config)
        reporting = ", ".join(status.generator_id for status in stats.generators)
    if reporting:
        raise ConfigError(
            f"run.name: generators of a run {config.run.name} report to this buffer ({reporting}), "
            f"or did until a moment ago: choose another run.name, or stop them and wait "
            f"buffer.lease_ttl_s ({config.buffer.lease_ttl_s:g} s)"
        )
    await forget(config.buffer.secret_url, config.run.name)


async def _read(config: RunConfig) -> BufferStats:
    async with open_buffer(config) as buffer:
        return await buffer.stats()
