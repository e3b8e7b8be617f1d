"""The greedy score of a checkpoint on held-out prompts."""

import asyncio
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from actors.chat import Renderer
from actors.daemon import make_runner, require_model
from actors.engines import make_engine
from actors.prompts import open_held_out
from actors.rewards import make_reward
from actors.rollout import unbuffered_lease
from streamrl.checkpoints.find import Checkpoint, is_checkpoint, newest, read_checkpoint
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import TrajectoryGroup

log = logging.getLogger(__name__)


def newest_model(config: RunConfig) -> Path:
    """The checkpoint that the run continues from.

    Raises:
        ConfigError: it has none, and the model that it starts from is not what it has trained; or
            none is complete.
    """
    found = newest(config.run.path)
    for damage in found.damaged:
        log.warning("%s; an older one is taken", damage.sentence)
    if found.checkpoint is None:
        raise ConfigError(
            f"{config.run.path} has no checkpoint yet; --checkpoint {config.model.path} scores the "
            "model that it starts from"
        )
    return _model_in(found.checkpoint)


def named_model(path: Path) -> Path:
    """A folder that a person names: a checkpoint, whose files are compared with its manifest, or
    any other model.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is missing or has changed.
        ConfigError: the checkpoint holds no model that an engine loads.
    """
    return _model_in(read_checkpoint(path)) if is_checkpoint(path) else path


def _model_in(checkpoint: Checkpoint) -> Path:
    if "hf_model" not in checkpoint.record["contents"]:
        raise ConfigError(
            f"{checkpoint.path} has no Hugging Face model, since learner.checkpoint.contents has "
            "no hf_model; `streamrl export RUN` makes one for --checkpoint"
        )
    return checkpoint.path


async def evaluate(config: RunConfig, model: Path) -> dict[str, Any]:
    """Mean reward of greedy completions of `data.num_eval_prompts` held-out prompts."""
    groups = await greedy_groups(config, model)
    return {"model": str(model), "num_prompts": len(groups), **_summary(groups)}


async def greedy_groups(config: RunConfig, model: Path) -> list[TrajectoryGroup]:
    """One greedy response to each held-out prompt, in the order of the prompts."""
    if config.generator.num_threads:
        torch.set_num_threads(config.generator.num_threads)
    section = config.model.model_copy(update={"path": str(model)})
    config = config.model_copy(update={"model": section})
    require_model(config)
    engine = make_engine(config, seed=config.run.seed)
    renderer, prompts = Renderer.from_config(config), open_held_out(config.data, config.run.seed)
    runner = make_runner(config, engine, renderer, prompts, make_reward(config.data))
    greedy = replace(runner, sampling=structs.replace(runner.sampling, temperature=0.0))
    numbers = range(config.data.num_eval_prompts)
    groups = await asyncio.gather(
        *(greedy.run(unbuffered_lease("evaluation", number)) for number in numbers)
    )
    await engine.close()
    return groups


def _summary(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [group.trajectories[0] for group in groups]
    return {
        "greedy_reward_mean": statistics.fmean(t.reward for t in trajectories),
        "response_length_mean": statistics.fmean(t.num_response_tokens for t in trajectories),
    }
