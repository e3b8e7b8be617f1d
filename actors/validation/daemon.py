"""The validator daemon, `streamrl validator`: one engine, one `Validator`.

Waits for the learner without a limit; ends by a signal or when the run is over. An engine in this
process is made once the run has made a step, which has the cores to itself until then.
"""

import argparse
import asyncio
import contextlib
import logging
from functools import partial

import torch

from actors.daemon import require_model
from actors.engines import make_engine
from actors.environments.stream import HeldOutStream, open_held_out_stream
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
from streamrl.tracking.prometheus import exporting, of_validator

log = logging.getLogger(__name__)

NAME = "validator"
ASK_S = 1.0


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    return service.run(partial(validate, config), role=NAME, config=config)


async def validate(config: RunConfig, shutdown: Shutdown) -> None:
    """Validates until the run is over or a signal arrives.

    Raises:
        ConfigError: the run is not validated, or there are no held-out prompts.
    """
    if not config.is_validated:
        raise ConfigError(
            f"validation.every: was {config.validation.every}, so there is nothing to validate; a "
            "number is the versions between two validations, auto takes 5 % of the time"
        )
    config = config.for_validator()
    with shutdown.empty_handed():
        require_model(config)
        stream = open_held_out_stream(config)
    buffer = connect(config)
    try:
        if config.generator.engine == "hf" and not await _first_step(buffer, shutdown):
            return
        await _validate(config, shutdown, buffer, stream)
    finally:
        await buffer.close()


async def _first_step(buffer: TrajectoryBuffer, shutdown: Shutdown) -> bool:
    """Waits for the first step of the run; whether it came before a signal, or the run's end."""
    ended, made = shutdown.requested, False
    log.info("waiting for the first step of the run")
    while not (made or ended.is_set()):
        stats, _ = await try_stats(buffer)
        if stats is not None and stats.is_over:
            log.info("the run is over")
            return False
        made = stats is not None and stats.policy_version > 0
        if not made:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ASK_S)
    return made


async def _validate(
    config: RunConfig, shutdown: Shutdown, buffer: TrajectoryBuffer, stream: HeldOutStream
) -> None:
    with shutdown.empty_handed():
        if config.generator.num_threads:
            torch.set_num_threads(config.generator.num_threads)
        renderer, decoder = ChatRenderer.from_config(config), open_decoder(config.model)
        engine = make_engine(config, seed=config.run.seed)
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
