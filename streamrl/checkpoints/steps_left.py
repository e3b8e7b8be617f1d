"""Whether a run that goes on from a checkpoint has steps left to make.

A launch asks before it writes anything, and reads no more than sizes; the learner asks again of the
checkpoint that it has chosen, whose contents it has compared.
"""

from pathlib import Path

from streamrl.checkpoints.find import Checkpoint, is_taken, newest, read_checkpoint
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


def require_steps_left(checkpoint: Checkpoint, max_steps: int) -> None:
    """
    Raises:
        ConfigError: the checkpoint is beyond the run's last step.
    """
    step = checkpoint.policy_version
    if step > max_steps:
        raise ConfigError(
            f"run.max_steps: was {max_steps}, and {checkpoint.path} is of step {step}: it must be "
            f"above {step} to go on"
        )


def require_steps_to_launch(config: RunConfig, *, resume: bool, new: bool) -> None:
    """Of the checkpoint that a launch with these flags goes on from, if any.

    Raises:
        ConfigError: see `require_steps_left`, `newest` and `read_checkpoint`.
    """
    match config.run.resume:
        case Path() as named if not (resume and is_taken(config.run.path, named)):
            checkpoint: Checkpoint | None = read_checkpoint(named, contents=False)
        case setting if resume or (setting == "auto" and not new):
            checkpoint = newest(config.run.path, contents=False).checkpoint
        case _:
            checkpoint = None
    if checkpoint is not None:
        require_steps_left(checkpoint, config.run.max_steps)
