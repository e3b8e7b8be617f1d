"""The generator daemon, `streamrl generator`: one engine, one `Generator`.

Waits for the buffer and the learner without limit; ends at a signal or when the run is over.
"""

import argparse
import asyncio
import gc
import logging
import uuid
import zlib
from functools import partial

import torch

from actors.engines import make_engine
from actors.environments import make_environment, require_rendering
from actors.episodes.mixed_runner import make_runner
from actors.gateway.agent import serving_agents
from actors.generator import Generator
from actors.prompts import open_stream
from actors.rendering.renderer import ChatRenderer
from buffers.connect import connect
from streamrl import service
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.run_folder import are_rows_checked
from streamrl.shutdown import Shutdown
from streamrl.tracking.prometheus import exporting, of_generator
from streamrl.types.ranges import check_id, named_after_host

# New Python objects before a garbage collection. Running episodes hold some ten thousand, which go
# without one.
GC_THRESHOLD = 20_000

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    gc.set_threshold(GC_THRESHOLD)
    config: RunConfig = arguments.run_config
    name = _name(arguments.id)
    return service.run(partial(generate, config, name), role=name, config=config)


def _name(given: str | None) -> str:
    """The given id, with {host} replaced by the host's name, or a random one."""
    if given is None:
        return f"generator-{uuid.uuid4().hex[:6]}"
    try:
        return check_id("--id", named_after_host(given))
    except ValueError as error:
        raise ConfigError(str(error)) from error


async def generate(config: RunConfig, generator_id: str, shutdown: Shutdown) -> None:
    """Generates until the run is over or a signal arrives."""
    with exporting(config, "generator", generator_id) as exported:
        with shutdown.empty_handed():
            config.require_ports()
            prepare(config)
            renderer = ChatRenderer.from_config(config)
            stream = open_stream(config, renderer, are_checked=are_rows_checked(config))
            for entry in config.entries:
                make_environment(entry)
            require_rendering(config.entries, renderer)
            seed = zlib.crc32(generator_id.encode()) ^ config.run.seed
            engine = make_engine(config, seed=seed, is_shared=True)
        buffer = connect(config)
        try:
            async with serving_agents(config, generator_id, renderer) as agents:
                runner = make_runner(config, engine, renderer, stream).played_by(agents)
                generator = Generator(config, generator_id, engine, runner.of, buffer)
                generator.on_report = lambda report: exported.show(
                    "self", lambda: of_generator(report)
                )
                path, kind = config.model.path, config.generator.engine
                log.info("%s serves %s with %s", generator_id, path, kind)
                signaled = asyncio.create_task(shutdown.requested.wait())
                signaled.add_done_callback(lambda _: generator.stop())
                await generator.run()
                signaled.cancel()
        finally:
            await engine.close()
            await buffer.close()


def prepare(config: RunConfig) -> None:
    """Prepare the process for an engine: check the model, set torch's threads.

    Raises:
        ConfigError: the model of `model.recipe` has not been made.
    """
    config.model.require_made()
    if config.generator.num_threads:
        torch.set_num_threads(config.generator.num_threads)
