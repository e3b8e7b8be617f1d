"""By which settings each recorded step was made, and which ones a replay takes.

    RUN/record/settings-00000012.yaml   of step 12 and those after it

A learner that records writes its configuration where it begins, unless the steps before were made
by the same. Invariant: it is there before the record of its first step. What was sampled stands in
the records, so a replay takes settings of the learner's own computation.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learners.optimizer import learning_rate
from learners.replay.record import RECORD_FOLDER
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.learner import ProfilerSettings
from streamrl.config.loading.changed import with_overrides
from streamrl.config.loading.similar import RESOLVED_FILE
from streamrl.config.loading.values import values_of
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError

_TAKEN = ("algorithm.", "learner.")
_RECORDED = ("learner.groups_per_step", "learner.num_ranks", "learner.mesh", "learner.checkpoint")
# The temperature is that of the learner's log-probabilities, and a loss may be divided by the
# longest response.
_COMPUTES = (
    "algorithm.",
    "generator.max_new_tokens",
    "generator.temperature",
    "learner.",
    "model.",
)
_COMPUTES_NOTHING = (
    "learner.checkpoint.",
    "learner.mesh.",
    "learner.num_ranks",
    "learner.peak_tflops",
    "learner.profiler.",
    "learner.rank_deadline_s",
)


def keep_settings(config: RunConfig, first_step: int) -> None:
    """Write the configuration of this step and those after it.

    Raises:
        OSError: the disk is full, for example.
    """
    run, text = config.run.path, to_yaml(config)
    before = _file_of(run, first_step)
    if before is None or before.read_text() != text:
        folder = run / RECORD_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"settings-{first_step:08d}.yaml", text)


def settings_files(run: Path) -> Mapping[int, Path]:
    """By the step from which each is valid, in order."""
    found = (run / RECORD_FOLDER).glob("settings-*.yaml")
    steps = ((path.stem.removeprefix("settings-"), path) for path in found)
    return dict(sorted((int(step), path) for step, path in steps if step.isdigit()))


def settings_of(run: RunConfig, step: int, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that this step of the run was made by, with these settings changed, for
    one process that writes nothing into the run's folder.

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
    folder = run.run
    path = _file_of(folder.path, step) or folder.path / RESOLVED_FILE
    config = load_config(path, environment={}).config
    config = with_overrides(config, overrides) if overrides else config
    alone = {"num_ranks": 1, "profiler": ProfilerSettings()}
    samples = config.tracking.samples.model_copy(update={"num_groups": 0})
    own = config.run.model_copy(update={"folder": folder.folder, "name": folder.name})
    return config.model_copy(
        update={
            "run": own,
            "learner": config.learner.model_copy(update=alone),
            "tracking": config.tracking.model_copy(update={"samples": samples}),
        }
    )


def first_change(start: RunConfig, steps: range) -> tuple[int, str] | None:
    """The first of these steps that was made by other settings than `start`, which are those of
    the first one, and in words which; None if there is none."""
    current, files = start, settings_files(start.run.path)
    for step in steps[1:]:
        if step in files:
            current = settings_of(start, step)
            if (difference := next(_differences(start, current), None)) is not None:
                return step, difference
        if _rate(start, step) != _rate(current, step):
            return step, f"run.max_steps {current.run.max_steps}, not {start.run.max_steps}"
    return None


def _file_of(run: Path, step: int) -> Path | None:
    """None for what a release recorded that kept none."""
    valid = [path for first, path in settings_files(run).items() if first <= step]
    return valid[-1] if valid else None


def _differences(start: RunConfig, other: RunConfig) -> Iterator[str]:
    before, after = values_of(start), values_of(other)
    for name in {**before, **after}:
        if name.startswith(_COMPUTES) and not name.startswith(_COMPUTES_NOTHING):
            then, now = before.get(name), after.get(name)
            if then != now:
                yield f"{name} {now}, not {then}"


def _rate(config: RunConfig, step: int) -> float:
    """The schedule of a critic is the policy's."""
    return learning_rate(step - 1, config.learner.optimizer, config.run.max_steps)
