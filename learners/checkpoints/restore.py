"""A trainer goes on from a checkpoint: everything that it needs to repeat the next step exactly."""

import torch
import torch.distributed as dist

from learners.checkpoints.contents import load_tensors
from learners.checkpoints.random_state import restore_random_state
from learners.checkpoints.start import for_loading
from learners.parallel.mesh import Mesh
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import Checkpoint
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


def restore(checkpoint: Checkpoint, config: RunConfig, trainer: Trainer) -> LearnerState:
    """Load what `learner.checkpoint.load_contents` names into the trainer; each rank by itself.

    Returns:
        The version and the books, which are in every checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model than the run, or does not hold that.
    """
    config = for_loading(config, checkpoint)
    path, record, wanted = checkpoint.path, checkpoint.record, config.learner.checkpoint.loaded
    for content in wanted:
        if content not in record["contents"]:
            raise ConfigError(
                f"learner.checkpoint.load_contents: {path} has no {content!r}, since it was saved "
                f"with learner.checkpoint.contents [{', '.join(record['contents'])}]"
            )
    load_tensors(path, config, trainer)
    if "extra" in wanted:
        trainer.credit.load_state_dict(record["credit"])
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
    """The trainer that goes on from a checkpoint, or from `model.path` without one."""
    torch.manual_seed(config.run.seed)
    policy = Policy.from_config(config, mesh=mesh)
    algorithm = config.algorithm
    reference = Policy.reference_of(config, policy, mesh) if algorithm.needs_reference else None
    critic = Critic.from_config(config, mesh) if algorithm.needs_values else None
    trainer = Trainer(config, policy, reference, critic, ranks)
    state = LearnerState() if checkpoint is None else restore(checkpoint, config, trainer)
    return trainer, state
