"""The generator daemon, `streamrl generator`: one engine, one `Generator`.

Waits for the buffer and the learner without a limit; ends by a signal or when the run is over.
"""

import argparse
import asyncio
import logging
import uuid
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from actors.engines import make_engine
from actors.environments import make_environment
from actors.environments.shared import open_group
from actors.episodes.rollout import GroupRunner
from actors.generator import Generator
from actors.prompts import open_prompts
from actors.prompts.fitting import fitting_rows
from actors.rendering.renderer import ChatRenderer
from actors.rewards import make_reward
from buffers.connect import connect
from streamrl import service
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError
from streamrl.interfaces import Engine, PromptSource, Reward
from streamrl.service import Shutdown
from streamrl.types import SamplingParams
from streamrl.types.ids import check_id

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    name = _name(arguments.id)
    return service.run(partial(generate, config, name), role=name, config=config)


def _name(given: str | None) -> str:
    """The id given, or a random one.

    Raises:
        ConfigError: it is no id; the log of the daemon is named after it.
    """
    if given is None:
        return f"generator-{uuid.uuid4().hex[:6]}"
    try:
        return check_id("--id", given)
    except ValueError as error:
        raise ConfigError(str(error)) from error


async def generate(config: RunConfig, generator_id: str, shutdown: Shutdown) -> None:
    """Generates until the run is over or a signal arrives."""
    require_model(config)
    if config.generator.num_threads:
        torch.set_num_threads(config.generator.num_threads)
    renderer = ChatRenderer.from_config(config)
    fitting = partial(fitting_rows, config, renderer)
    prompts = open_prompts(config.data, config.run.seed, fitting)
    reward = make_reward(config.data)
    make_environment(config.generator.environment)
    if config.generator.environment != "single_turn":
        renderer.require_replies()
    engine = make_engine(config, seed=zlib.crc32(generator_id.encode()) ^ config.run.seed)
    buffer = connect(config)
    try:
        runner = replace(
            make_runner(config, engine, renderer, prompts, reward),
            group_size=config.generator.group_size,
            oversample=config.generator.oversample,
            with_greedy_reward=config.algorithm.needs_greedy_rewards,
        )
        generator = Generator(config, generator_id, runner, buffer)
        log.info("%s serves %s with %s", generator_id, config.model.path, config.generator.engine)
        signaled = asyncio.create_task(shutdown.requested.wait())
        signaled.add_done_callback(lambda _: generator.stop())
        await generator.run()
        signaled.cancel()
    finally:
        await engine.close()
        await buffer.close()


def make_runner(
    config: RunConfig, engine: Engine, renderer: ChatRenderer, prompts: PromptSource, reward: Reward
) -> GroupRunner:
    """Samples one response to a prompt with the settings of `generator`."""
    return GroupRunner(
        engine=engine,
        prompts=prompts,
        renderer=renderer,
        make_environment=partial(make_environment, config.generator.environment),
        environment=config.generator.environment,
        reward=reward,
        sampling=sampling_params(config),
        group_size=1,
        max_model_len=config.max_model_len,
        deadline_s=config.generator.group_deadline_s,
        run_seed=config.run.seed,
        settings=config.generator.episode,
        open_group=partial(open_group, config.generator.environment),
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    """The sampling settings of `generator`."""
    generator = config.generator
    return SamplingParams(
        max_new_tokens=generator.max_new_tokens,
        min_new_tokens=generator.min_new_tokens,
        temperature=generator.temperature,
        top_p=generator.top_p,
        top_k=generator.top_k,
        stop_token_ids=generator.stop_token_ids,
        ignore_eos=generator.ignore_eos,
    )


def require_model(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: the model is made locally, by `streamrl make-model`, and has not been made.
    """
    if config.model.recipe is not None and not Path(config.model.path).exists():
        raise ConfigError(
            f"model.path: there is no {config.model.path}; run `streamrl make-model` with this "
            "configuration first"
        )
