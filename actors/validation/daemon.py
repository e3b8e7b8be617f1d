"""The validator daemon, `streamrl validator`: one engine, one `Validator`.

Waits for the learner without a limit; ends by a signal or when the run is over.
"""

import argparse
import asyncio
import contextlib
import logging
from functools import partial

import torch

from actors.daemon import require_model
from actors.engines import make_engine
from actors.environments.stream import open_held_out_stream
from actors.episodes.runner import make_runner
from actors.rendering.renderer import ChatRenderer
from actors.validation.validator import Validator
from buffers.connect import connect, try_stats
from streamrl import service
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.samples.record import open_decoder
from streamrl.shutdown import Shutdown
from streamrl.tracking.prometheus import exporting
from streamrl.tracking.prometheus.readings import of_validator

log = logging.getLogger(__name__)

NAME = "validator"
ASK_S = 1.0


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    return service.run(partial(validate, config), role=NAME, config=config)


async def validate(config: RunConfig, shutdown: Shutdown) -> None:
    """Validates until the run is over or a signal arrives.

    Raises:
        ConfigError: `validation.every` is 0, or there are no held-out prompts.
    """
    if not config.validation.every:
        raise ConfigError("validation.every: was 0, so there is nothing to validate")
    config = config.for_validator()
    with shutdown.empty_handed():
        require_model(config)
        if config.generator.num_threads:
            torch.set_num_threads(config.generator.num_threads)
        stream = open_held_out_stream(config)
        renderer, decoder = ChatRenderer.from_config(config), open_decoder(config.model)
        engine = make_engine(config, seed=config.run.seed)
    buffer = connect(config)
    try:
        runner = make_runner(config, engine, renderer, stream).single()
        several = runner.changed(group_size=config.validation.num_samples)
        validator = Validator(config, NAME, several, len(stream), decoder)
        log.info("%s serves %s with %s", NAME, config.model.path, config.generator.engine)
        with exporting(config, "validator", NAME) as exported:
            validator.on_status = lambda status: exported.show(
                "status", lambda: of_validator(status, engine.gauges()["num_tokens"])
            )
            await _run_until_over(validator, buffer, shutdown)
    finally:
        await engine.close()
        await buffer.close()


async def _run_until_over(
    validator: Validator, buffer: TrajectoryBuffer, shutdown: Shutdown
) -> None:
    """Waits for a failure of the validator, the end of the run, or a signal."""
    validating = asyncio.create_task(validator.run())
    endings = [asyncio.create_task(shutdown.requested.wait()), asyncio.create_task(_ended(buffer))]
    try:
        await asyncio.wait([validating, *endings], return_when=asyncio.FIRST_COMPLETED)
        if validating.done():
            validating.result()
    finally:
        for task in (validating, *endings):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await validating


async def _ended(buffer: TrajectoryBuffer) -> None:
    """Waits until the buffer says that the run is over; asks every ASK_S."""
    while True:
        await asyncio.sleep(ASK_S)
        stats, _ = await try_stats(buffer)
        if stats is not None and stats.is_over:
            log.info("the run is over")
            return
