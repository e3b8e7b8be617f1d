"""Restores a trainer from a checkpoint, with everything needed to repeat the next step exactly.

`choose` finds the checkpoint that a learner starts from, by `run.resume`, and its history:

    never   the model of the configuration
    auto    the newest complete checkpoint of the run's history
    a path  that checkpoint, of this run or of another one; it must be complete

Whatever else is in the run's folder and is not of that history is abandoned.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace

from learners.checkpoints.contents import load_tensors
from learners.checkpoints.writer import restore_random_state
from learners.optimizer import move_state
from learners.parallel.mesh import Mesh
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.policy.teachers import Teachers
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import (
    Checkpoint,
    checkpoints_of,
    has_other_base,
    is_checkpoint,
    is_taken,
    newest,
    read_checkpoint,
    require_same_adapter,
)
from streamrl.checkpoints.history import History, continued, finished, new_history, read_history
from streamrl.config import RunConfig
from streamrl.config.run import RunSettings
from streamrl.errors import ConfigError
from streamrl.tracking.jsonl import TRAINED_FILE, read_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerStart:
    """`checkpoint` is None for the model of the configuration.

    `history` becomes the surviving one once the learner has attached; `reason` says why any newer
    checkpoints are abandoned then. `lines_from` is the folder whose `metrics.jsonl` and
    `trained.jsonl` have the steps of this history, None if there is none.
    """

    checkpoint: Checkpoint | None
    history: History
    reason: str
    lines_from: Path | None

    @property
    def policy_version(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.policy_version


def choose(run: RunSettings) -> LearnerStart:
    """Find what to start from, by `run.resume`. Changes nothing.

    Raises:
        ConfigError: a path was given and holds no checkpoint, or none of the run's is complete.
        DamagedCheckpointError: a path was given and its checkpoint is damaged.
    """
    match run.resume:
        case "never":
            return LearnerStart(None, new_history(), "run.resume is never", run.path)
        case "auto":
            return _newest(run.path)
        case path:
            return _named(run.path, Path(path))


def resumed(config: RunConfig) -> RunConfig:
    """The configuration for `--resume`. A checkpoint that `run.resume` names is used once; after
    that the run has newer ones."""
    resume = config.run.resume
    if isinstance(resume, Path) and not is_taken(config.run.path, resume):
        return config
    return config.with_values(run={"resume": "auto"})


def for_loading(config: RunConfig, checkpoint: Checkpoint) -> RunConfig:
    """The configuration for loading this checkpoint: `load_contents` applies to the checkpoint that
    `run.resume` names; those that the run has saved since are loaded whole."""
    resume, named = config.run.resume, ""
    if resume not in ("never", "auto"):
        named = str(resume)
    elif (history := read_history(checkpoints_of(config.run.path))) is not None:
        named = history.resume
    if not named or Path(named).absolute() == checkpoint.path.absolute():
        return config
    return config.with_values(learner={"checkpoint": {"load_contents": None}})


def _newest(run: Path) -> LearnerStart:
    found, current = newest(run), read_history(checkpoints_of(run))
    if found is None:
        return LearnerStart(None, new_history(), "the run had no checkpoint", run)
    for damage in found.damaged:
        log.warning(
            "%s; going on from %s: the steps %d to %d, and any after them, are trained again",
            damage.sentence,
            found.path,
            found.policy_version + 1,
            damage.policy_version,
        )
    reason = (
        "; ".join(damage.sentence for damage in found.damaged) or "another learner had saved it"
    )
    return _after(found, run, "" if current is None else current.resume, reason)


def _named(run: Path, path: Path) -> LearnerStart:
    if not is_checkpoint(path):
        raise ConfigError(f"run.resume: {path} is no checkpoint (it has no state.json)")
    place, own = path, checkpoints_of(run)
    if path.parent.resolve() == own.resolve():
        # The run's own folder, even if named through a link or with "..".
        place = own / path.name
    return _after(read_checkpoint(place), run, str(path), f"run.resume named {path}")


def _after(checkpoint: Checkpoint, run: Path, resume: str, reason: str) -> LearnerStart:
    path, version = checkpoint.path.absolute(), checkpoint.policy_version
    history = continued(checkpoint.history, version, path, resume)
    if path.parent == checkpoints_of(run).absolute():
        return LearnerStart(checkpoint, history, reason, run)
    lines_from = _lines_beside(path, history.first_step, version)
    if lines_from is None:
        books = finished(checkpoint.books)
        history = replace(history, first_step=version + 1, finished_before=books)
    return LearnerStart(checkpoint, history, reason, lines_from)


def _lines_beside(path: Path, first_step: int, last_step: int) -> Path | None:
    """The folder of another run, or of abandoned steps of this one, that has the line of each
    step."""
    for folder in (path.parent, path.parent.parent):
        steps = {line["step"] for line in read_lines(folder / TRAINED_FILE)}
        if steps.issuperset(range(first_step, last_step + 1)):
            return folder
    return None


def restore(checkpoint: Checkpoint, config: RunConfig, trainer: Trainer) -> LearnerState:
    """Load what `learner.checkpoint.load_contents` names into the trainer; each rank does so by
    itself.

    Returns:
        The version and the books, which are in every checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model or adapter, or lacks those contents.
    """
    config = for_loading(config, checkpoint)
    path, record, wanted = checkpoint.path, checkpoint.record, config.learner.checkpoint.loaded
    for content in wanted:
        if content not in record["contents"]:
            raise ConfigError(
                f"learner.checkpoint.load_contents: {path} has no {content!r}, since it was saved "
                f"with learner.checkpoint.contents [{', '.join(record['contents'])}]"
            )
    require_same_adapter(checkpoint, config.model, config.learner.lora)
    if config.algorithm.needs_reference and has_other_base(checkpoint, config.model):
        log.warning(
            "model.path: the weights of %s are not those that the run of %s began with, and the "
            "reference policy has them from here on",
            config.model.path,
            path,
        )
    load_tensors(path, wanted, trainer, config.model.path)
    if config.learner.offload.optimizer:
        # Otherwise the state would stay on the GPU during the first step's passes.
        for optimizer in trainer.optimizers:
            move_state(optimizer, to_host=True)
    if "extra" in wanted:
        trainer.load_state_dict(record["credit"])
        distributed = dist.is_initialized()
        rank = dist.get_rank() if distributed else 0
        restore_random_state(record["random"], rank, dist.get_world_size() if distributed else 1)
    return LearnerState(policy_version=checkpoint.policy_version, books=checkpoint.books)


def load_trainer(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    mesh: Mesh | None = None,
    ranks: Ranks | None = None,
) -> tuple[Trainer, LearnerState]:
    """The trainer restored from a checkpoint, or new from `model.path` without one."""
    torch.manual_seed(config.run.seed)
    policy = Policy.from_config(config, mesh=mesh)
    algorithm = config.algorithm
    reference = Policy.reference_of(config, policy, mesh) if algorithm.needs_reference else None
    critic = Critic.from_config(config, mesh) if algorithm.needs_values else None
    taught = algorithm.distillation is not None
    teachers = Teachers.from_config(config, mesh, ranks) if taught else None
    trainer = Trainer(config, policy, reference, critic, ranks, teachers)
    state = LearnerState() if checkpoint is None else restore(checkpoint, config, trainer)
    return trainer, state
