"""Which settings a replay takes: those of the learner's own computation.

What was sampled stands in the records, so a setting of another section would change nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from streamrl.config import RunConfig, load_config
from streamrl.config.learner import ProfilerSettings
from streamrl.config.loading.similar import RESOLVED_FILE
from streamrl.errors import ConfigError
from streamrl.run_folder import config_of

_TAKEN = ("algorithm.", "learner.")
_RECORDED = ("learner.groups_per_step", "learner.num_ranks", "learner.mesh", "learner.checkpoint")


def settings_of(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of the run, with these settings changed, for one process that writes
    nothing into the run's folder.

    Raises:
        ConfigError: a setting that a replay does not read, or one that cannot be used.
    """
    for override in overrides:
        name = override.partition("=")[0]
        if not name.startswith(_TAKEN) or name.startswith(_RECORDED):
            raise ConfigError(
                f"--set {name}: a replay trains recorded batches in one process, so it takes "
                "algorithm.* and learner.* alone, without groups_per_step, num_ranks, mesh and "
                "checkpoint"
            )
    recorded = config_of(run)
    changed = load_config(run / RESOLVED_FILE, overrides, environment={}).config
    alone = {"num_ranks": 1, "profiler": ProfilerSettings()}
    samples = changed.tracking.samples.model_copy(update={"num_groups": 0})
    return changed.model_copy(
        update={
            "run": recorded.run,
            "learner": changed.learner.model_copy(update=alone),
            "tracking": changed.tracking.model_copy(update={"samples": samples}),
        }
    )
