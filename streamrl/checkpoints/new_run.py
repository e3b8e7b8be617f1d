"""Whether the buffer at hand lets a run begin at its first step.

A learner that begins anew on the buffer of a run abandons all of that run's steps, which whoever
typed the same command again did not mean. Invariant: this is asked before anything is changed, by
the learner before it attaches, however it was started; a launch asks it earlier, of a server that
outlives its runs. Where `run.resume` is auto or a checkpoint, that is the choice.
"""

from streamrl.checkpoints.find import newest
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import BufferStats


def require_new_run(config: RunConfig, stats: BufferStats) -> None:
    """
    Raises:
        ConfigError: a learner has attached to the buffer before.
    """
    if not stats.books.learner_term:
        return
    folder = config.run.path
    remedy = (
        f"stop the buffer and move {folder} aside, as launch --new does"
        if config.buffer.has_daemon
        else "delete it there with launch --new or streamrl books --forget"
    )
    raise ConfigError(
        f"run.name: the buffer holds a run {config.run.name} at version {stats.policy_version} "
        f"already: --resume goes on {_from(config)}. To start anew, {remedy}, or choose another "
        "run.name"
    )


def _from(config: RunConfig) -> str:
    """Where `--resume` goes on."""
    try:
        checkpoint = newest(config.run.path, contents=False).checkpoint
    except ConfigError:
        return "from the checkpoint that run.resume has to name, since none is complete"
    if checkpoint is None:
        return (
            f"at version 0, since {config.run.path} has no checkpoint; the run's prompts are "
            "trained again, and none is lost"
        )
    return f"from its newest checkpoint, {checkpoint.path}"
