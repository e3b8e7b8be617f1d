"""`streamrl learner`: the learner daemon, from a configuration; with torchrun, one of its ranks.

Ends after `run.max_steps`, or after a signal once the last step is durable. The first rank waits
for the buffer and for groups; generators may join and leave at any time. The other ranks wait for
the first one, which makes all decisions, also what to do at a signal.
"""

import argparse
import asyncio
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from buffers.connect import connect
from learners.checkpoints.records import RunRecords
from learners.checkpoints.restore import LearnerStart, choose, load_trainer, resumed
from learners.checkpoints.writer import CheckpointWriter
from learners.executor.lockstep import End, FetchGroups, LearnerRank, Lockstep
from learners.executor.place import RankPlace, join
from learners.executor.starter import is_starter, start_ranks
from learners.learner import Learner
from learners.policy.policy import Policy
from learners.samples import SampleWriter
from learners.session import LearnerSession, LearnerState, unless_late, unless_set
from learners.status_reporter import StatusReporter
from learners.step_record import Recorder
from learners.trainer import Trainer
from learners.validations import Validations
from streamrl import service
from streamrl.algorithms.objective import require_algorithm
from streamrl.checkpoints.find import checkpoints_of, require_new_run, require_steps_left
from streamrl.checkpoints.history import History, survives
from streamrl.config import RunConfig
from streamrl.config.addresses import require_port
from streamrl.config.generator import GeneratorSettings
from streamrl.config.loading.load import config_file
from streamrl.errors import UnreachableBufferError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import require_own_folder
from streamrl.shutdown import Shutdown
from streamrl.tracking import CLOSE_S
from streamrl.tracking.prometheus import Exported, exporting, of_learner
from streamrl.weights.sender import WeightSender

STOPPED_S = 2.0

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    if arguments.resume:
        require_own_folder(config, Path(config_file(arguments)))
        config = resumed(config)
    if is_starter(config.learner):
        return service.run(partial(start_ranks, config), role="learner-ranks", config=config)
    rank = int(os.environ.get("RANK", "0"))
    role = f"learner-{rank}" if rank else "learner"
    return service.run(partial(train, config), role=role, config=config)


async def train(config: RunConfig, shutdown: Shutdown) -> None:
    """Train until the run is over or a signal comes."""
    with shutdown.empty_handed():
        require_port("weights.address", config.weights.address)
        config.model.require_made()
        require_algorithm(config.algorithm)
        _warn_of_truncation(config.generator)
        if config.learner.num_threads:
            torch.set_num_threads(config.learner.num_threads)
        place = join(config.learner)
        trainer, state, start = _load(config, place)
    buffer = connect(config)
    try:
        with shutdown.empty_handed():
            place.liveness.start()
            place.require_same(state.policy_version)
            start = replace(start, history=place.all.gather(start.history)[0])
        unreachable: UnreachableBufferError | None = None
        if place.all.index == 0:
            with exporting(config, "learner", "learner") as exported:
                rank = (place, trainer, buffer, state, start, exported)
                unreachable = await _lead(config, shutdown, *rank)
        else:
            await _follow(config, shutdown, place, trainer, buffer, start)
        # Any other failure skips this, and so ends the other ranks too.
        place.part()
        if unreachable is not None:
            raise unreachable
    finally:
        await buffer.close()


async def _lead(
    config: RunConfig,
    shutdown: Shutdown,
    place: RankPlace,
    trainer: Trainer,
    buffer: TrajectoryBuffer,
    state: LearnerState,
    start: LearnerStart,
    exported: Exported,
) -> UnreachableBufferError | None:
    """The first rank: the learner's loop and the tasks beside it. Returns the error to raise once
    the ranks have parted."""
    if not await _may_begin(config, buffer, shutdown):
        place.all.send(End())
        return None
    service.keep_settings(config)
    sender = _make_sender(config, trainer.policy, start.history)
    recorder = _make_recorder(config, place, start)
    records = RunRecords(config, start, sender.validating, (exported,), recorder)
    reporter = StatusReporter(config, buffer, sender)
    reporter.on_report = lambda s: exported.show("status", lambda: of_learner(s, config))
    validations = Validations(config, sender, records, reporter)
    samples = SampleWriter(config, state.policy_version, records.log_samples)
    rank = LearnerRank(
        trainer,
        place.data,
        fetch=_fetch(buffer, shutdown),
        save=records.save,
        snapshot=sender.snapshot,
        show=samples.add,
        record=None if recorder is None else recorder.add,
    )
    moves = place.mesh is not None or config.algorithm.rescore_share > 0
    lockstep = Lockstep(rank, place.all, place.liveness, moves_parameters=moves)
    fetch = lockstep.fetch if place.all.count > 1 else None
    session = LearnerSession(config, buffer, reporter, state, fetch, start.history.learner_id)
    learner = Learner(config, lockstep, session, sender, records, reporter, validations)
    place.liveness.on_order(lambda: shutdown.ask("another rank was told to end"))
    signaled = asyncio.create_task(shutdown.requested.wait())
    signaled.add_done_callback(lambda _: learner.stop())
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = (sender.run(), reporter.run(), place.liveness.watch())
            running = [tasks.create_task(work) for work in beside]
            unreachable: UnreachableBufferError | None = None
            try:
                await learner.run()
            except UnreachableBufferError as error:
                unreachable = error
            await lockstep.end()
            for task in running:
                task.cancel()
        return unreachable
    finally:
        signaled.cancel()
        sender.close()
        samples.close()
        # The steps are saved: after a signal a hanging tracker is not waited for long.
        records.close(STOPPED_S if shutdown.requested.is_set() else CLOSE_S)


async def _may_begin(config: RunConfig, buffer: TrajectoryBuffer, shutdown: Shutdown) -> bool:
    """Check that the buffer holds no other run before this learner binds or changes anything; false
    if a signal came first. Waits for the buffer."""
    if config.run.resume != "never":
        return True
    stats = await unless_set(shutdown.requested, buffer.stats())
    if stats is not None:
        require_new_run(config, stats.books.learner_term, stats.policy_version)
    return stats is not None


async def _follow(
    config: RunConfig,
    shutdown: Shutdown,
    place: RankPlace,
    trainer: Trainer,
    buffer: TrajectoryBuffer,
    start: LearnerStart,
) -> None:
    """Another rank: executes the first rank's commands, and passes signals on to it."""
    writer = CheckpointWriter(config, start.history)
    recorder = _make_recorder(config, place, start)
    flush = (lambda: None) if recorder is None else recorder.flush
    rank = LearnerRank(
        trainer,
        place.data,
        fetch=_fetch(buffer, shutdown),
        save=lambda trainer, state: writer.save(trainer, state, flush=flush),
        snapshot=lambda parameters, _: [parameters[name] for name in parameters],
        record=None if recorder is None else recorder.add,
    )
    lockstep = Lockstep(rank, place.all, place.liveness)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(place.liveness.watch())
        signaled = tasks.create_task(shutdown.requested.wait())
        signaled.add_done_callback(lambda s: None if s.cancelled() else place.liveness.order())
        await lockstep.follow()
        watching.cancel()
        signaled.cancel()
    writer.close()
    await lockstep.end()


def _fetch(buffer: TrajectoryBuffer, shutdown: Shutdown) -> FetchGroups:
    """The buffer's `fetch`, bounded like its other answers once the learner is stopping."""
    return lambda indices: unless_late(shutdown.requested, buffer.fetch(indices))


def _load(config: RunConfig, place: RankPlace) -> tuple[Trainer, LearnerState, LearnerStart]:
    """Load the trainer from the checkpoint that `run.resume` selects, or from `model.path`."""
    start = choose(config.run)
    trainer, state = load_trainer(config, start.checkpoint, place.mesh, place.data)
    if start.checkpoint:
        require_steps_left(start.checkpoint, config.run.max_steps)
    path = start.checkpoint.path if start.checkpoint else None
    log.info("starting from %s at version %d", path or config.model.path, state.policy_version)
    return trainer, state, start


def _make_recorder(config: RunConfig, place: RankPlace, start: LearnerStart) -> Recorder | None:
    """The recorder of steps, if `buffer.record` asks for one."""
    if not config.buffer.record:
        return None
    return Recorder(config, start.history, place.data.index, place.data.count)


def _make_sender(config: RunConfig, policy: Policy, history: History) -> WeightSender:
    weights = config.weights
    if weights.dtype == "float8_e4m3fn":
        log.warning(
            "weights.dtype float8_e4m3fn moves each weight of a matrix by up to 1/16: generators "
            "sample from another policy than the learner's, see mismatch/*; rollout_is corrects it"
        )
    layout = policy.layout(weights)
    folder = config.run.path / "weights"
    with service.binding("weights.address", weights.address):
        sender = WeightSender(
            weights,
            layout,
            policy.device,
            folder,
            config.buffer.curve,
            history.learner_id,
            config.run.name,
            partial(survives, checkpoints_of(config.run.path), history),
        )
    log.info("announcing %.1f MB of weights at %s", layout.num_bytes / 1e6, sender.address)
    return sender


def _warn_of_truncation(generator: GeneratorSettings) -> None:
    for setting in generator.truncations:
        log.warning(
            "%s cuts off the sampled distribution, and the learner's log-probabilities are over "
            "all tokens: importance weights will be below 1; set generator.keep_sampling_mask=true "
            "and generator.top_k, which replay what was left",
            setting,
        )
