"""`streamrl learner`: the learner daemon, made from a configuration.

Ends after `run.max_steps`, or at a signal once the step at hand is durable. Waits for the buffer
and for groups; generators may join and leave at any time.
"""

import argparse
import asyncio
import logging
from functools import partial

import torch

from buffers.connect import connect
from learners.checkpoints.records import RunRecords
from learners.checkpoints.start import Start, choose, resumed
from learners.checkpoints.state import restore
from learners.learner import Learner
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerSession, LearnerState
from learners.status_reporter import StatusReporter
from learners.trainer import Trainer
from streamrl import service
from streamrl.algorithms.objective import require_algorithm
from streamrl.checkpoints.steps_left import require_steps_left
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError
from streamrl.service import Shutdown
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if arguments.resume:
        config = resumed(config)
    return service.run(partial(train, config), role="learner", config=config)


async def train(config: RunConfig, shutdown: Shutdown) -> None:
    """Train until the run is over or a signal comes."""
    _require_port(config)
    require_algorithm(config.algorithm)
    _warn_of_truncation(config)
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    trainer, state, start = _load(config)
    sender = _make_sender(config, trainer.policy)
    buffer = connect(config)
    records = RunRecords(config, start)
    reporter = StatusReporter(config, buffer, sender)
    session = LearnerSession(config, buffer, reporter, state)
    learner = Learner(config, trainer, session, sender, records, reporter)
    signaled = asyncio.create_task(shutdown.requested.wait())
    signaled.add_done_callback(lambda _: learner.stop())
    try:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(sender.run())
            reporting = tasks.create_task(reporter.run())
            await learner.run()
            sending.cancel()
            reporting.cancel()
    finally:
        signaled.cancel()
        sender.close()
        records.close()
        await buffer.close()


def _load(config: RunConfig) -> tuple[Trainer, LearnerState, Start]:
    """From the checkpoint that `run.resume` means, or from `model.path`."""
    torch.manual_seed(config.run.seed)
    start = choose(config)
    path = start.checkpoint.path if start.checkpoint else None
    policy = Policy.from_config(config, path)
    algorithm = config.algorithm
    reference = Policy.from_config(config) if algorithm.needs_reference else None
    critic = Critic.from_config(config) if algorithm.needs_values else None
    trainer = Trainer(config, policy, reference, critic)
    state = LearnerState()
    if start.checkpoint:
        state = restore(start.checkpoint, config, trainer)
        require_steps_left(start.checkpoint, config.run.max_steps)
    log.info("starting from %s at version %d", path or config.model.path, state.policy_version)
    return trainer, state, start


def _make_sender(config: RunConfig, policy: Policy) -> WeightSender:
    weights = config.weights
    dtype = getattr(torch, weights.dtype) if weights.dtype else None
    if weights.dtype == "float8_e4m3fn":
        log.warning(
            "weights.dtype float8_e4m3fn moves each weight of a matrix by up to 1/16: generators "
            "sample from another policy than the learner's, see mismatch/*; rollout_is corrects it"
        )
    layout = Layout(manifest_of(policy.parameters(), dtype), weights.bucket_bytes)
    folder = config.run.path / "weights"
    with service.binding("weights.address", weights.address):
        sender = WeightSender(weights, layout, policy.device, folder, config.buffer.curve)
    log.info("announcing %.1f MB of weights at %s", layout.num_bytes / 1e6, sender.address)
    return sender


def _require_port(config: RunConfig) -> None:
    if config.weights.address.endswith(":0"):
        raise ConfigError(
            f"weights.address {config.weights.address} has port 0, which only `streamrl launch` "
            "resolves; daemons started on their own need a port they agree on"
        )


def _warn_of_truncation(config: RunConfig) -> None:
    for setting in config.generator.truncations:
        log.warning(
            "%s cuts off the sampled distribution, which the learner's log-probabilities cannot "
            "reproduce: importance weights will be below 1",
            setting,
        )
