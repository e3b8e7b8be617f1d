"""The greedy score of a checkpoint on held-out prompts.

Invariant: the checkpoint's own weights are scored, even on a server elsewhere: it is sent them as a
learner sends a version, and keeps them.
"""

import asyncio
import logging
import statistics
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from msgspec import structs

from actors.concurrency import DeadlineError, deadline, first_result
from actors.daemon import prepare
from actors.engines import make_engine
from actors.engines.weight_targets import weight_locality
from actors.episodes.mixed_runner import FirstGroups, make_runner, sampling_params
from actors.prompts import open_held_out_stream
from actors.rendering.renderer import ChatRenderer
from streamrl.checkpoints.find import Checkpoint, is_checkpoint, newest, read_checkpoint
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, WeightTransferError
from streamrl.interfaces import Engine
from streamrl.types import LoadReport, WeightUpdate
from streamrl.vision.families import load_pretrained
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

OnDone: TypeAlias = Callable[[int, int], None]
"""(number of finished prompts, number of prompts)"""
_NUM_ATTEMPTS = 2


def newest_model(config: RunConfig) -> Path:
    """The checkpoint that the run continues from.

    Raises:
        ConfigError: it has none, and the model that it starts from is not what it has trained; or
            none is complete.
    """
    found = newest(config.run.path)
    if found is None:
        raise ConfigError(
            f"{config.run.path} has no checkpoint yet; --checkpoint {config.model.path} scores the "
            "model that it starts from"
        )
    for damage in found.damaged:
        log.warning("%s; an older one is taken", damage.sentence)
    return _model_in(found)


def named_model(path: Path) -> Path:
    """The folder that a person names: a checkpoint, whose files are compared with its manifest, or
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


async def evaluate(
    config: RunConfig, model: Path, on_done: OnDone = lambda num_done, num_prompts: None
) -> dict[str, Any]:
    """Mean reward of greedy completions of `data.num_eval_prompts` held-out prompts; `on_done` is
    called as each is finished."""
    return scores_of(str(model), await greedy_groups(config, model, on_done))


def scores_of(model: str, greedy: FirstGroups) -> dict[str, Any]:
    """The scores of these groups, as in `evaluation.json`."""
    left_out = {"num_too_long": greedy.num_too_long, "num_failed": greedy.num_failed}
    # Each group is one episode, whose segments all have its reward.
    episodes = [group.trajectories for group in greedy.groups]
    lengths = [sum(segment.num_response_tokens for segment in segments) for segments in episodes]
    return {
        "model": model,
        "num_prompts": len(greedy.groups),
        **{name: count for name, count in left_out.items() if count},
        "greedy_reward_mean": statistics.fmean(segments[0].reward for segments in episodes),
        "response_length_mean": statistics.fmean(lengths),
    }


async def greedy_groups(
    config: RunConfig, model: Path, on_done: OnDone = lambda num_done, num_prompts: None
) -> FirstGroups:
    """One greedy response to each held-out prompt; raises as `greedy_groups_of`, or
    WeightTransferError: a server elsewhere did not load the model."""
    generator = config.generator.reading_weights()
    config = config.with_values(model={"path": str(model)}, generator=generator)
    prepare(config)
    engine = make_engine(config, seed=config.run.seed)
    try:
        if generator.url is not None:
            await _send_weights(config, engine)
        return await greedy_groups_of(config, engine, on_done)
    finally:
        await engine.close()


async def greedy_groups_of(
    config: RunConfig, engine: Engine, on_done: OnDone = lambda num_done, num_prompts: None
) -> FirstGroups:
    """The same from an engine with whatever weights it has.

    Raises:
        RolloutError: every prompt failed.
        ConfigError: no prompt fits into `data.max_prompt_length`.
    """
    renderer, stream = ChatRenderer.from_config(config), open_held_out_stream(config)
    sampling = structs.replace(sampling_params(config), temperature=0.0)
    greedy = make_runner(config, engine, renderer, stream).single().changed(sampling=sampling)
    done = count(1)
    first = await greedy.run_first(
        len(stream),
        "evaluation",
        config.generator.max_num_seqs,
        lambda: on_done(next(done), len(stream)),
    )
    if not first.groups:
        raise ConfigError(
            f"data.max_prompt_length: was {config.data.max_prompt_length}; none of the "
            f"{len(stream)} held-out prompts fits"
        )
    return first


async def _send_weights(config: RunConfig, engine: Engine) -> None:
    """Send the engine the weights of `model.path`. Waits until it has loaded them, has failed to,
    or the deadline is over."""
    path, trust = config.model.path, config.model.trust_remote_code
    model = load_pretrained(path, dtype=torch.float32, trust_remote_code=trust)
    parameters = dict(model.named_parameters())
    host = config.weights.address.rpartition(":")[0]
    here = {"address": f"{host}:0", "transport": "broadcast", "store": None}
    weights = config.weights.model_copy(update=here)
    layout = Layout(manifest_of(parameters), weights.bucket_bytes)
    is_loaded = asyncio.Event()

    async def load_weights(update: WeightUpdate) -> LoadReport:
        report = await engine.load_weights(update)
        is_loaded.set()
        return report

    with TemporaryDirectory() as folder:
        sender = WeightSender(
            weights, layout, torch.device("cpu"), Path(folder), config.buffer.curve
        )
        receiver = WeightReceiver(
            sender.address,
            "evaluation",
            load_weights,
            locality=weight_locality(config.generator),
            num_ranks=config.generator.num_ranks,
            has_weights=False,
            curve=config.buffer.curve,
        )
        sender.snapshot(parameters, 0)
        sender.publish()
        limit_s = _NUM_ATTEMPTS * weights.deadline_s
        try:
            async with deadline(limit_s):
                await first_result(is_loaded.wait(), sender.run(), receiver.run())
        except DeadlineError as error:
            raise WeightTransferError(
                f"generator.{config.generator.engine}.url: {config.generator.url} has not loaded "
                f"{config.model.path} within {limit_s:g} s"
            ) from error
        finally:
            sender.close()
