"""Where a replay can begin: the model of the configuration, or a checkpoint of the run, if the step
after it is recorded."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from streamrl.checkpoints.find import (
    Checkpoint,
    checkpoints_of,
    list_checkpoints,
    read_checkpoint,
)
from streamrl.checkpoints.history import read_history
from streamrl.errors import ConfigError, DamagedCheckpointError


def choose_start(run: Path, recorded: Collection[int], version: int | None) -> Checkpoint | None:
    """The checkpoint of this version, or the oldest one that the records continue; None for the
    model of the configuration.

    Raises:
        ConfigError: there is none.
    """
    if not recorded:
        raise ConfigError(f"{run}: nothing is recorded; set buffer.record: true before a run")
    candidates = dict(_candidates(run))
    possible = sorted(v for v in candidates if v + 1 in recorded)
    chosen = possible[0] if version is None and possible else version
    if chosen is None or chosen not in possible:
        wanted = "" if version is None else f"--from {version}: "
        where = f"from {', '.join(map(str, possible))}" if possible else "from nowhere"
        raise ConfigError(
            f"{wanted}the steps {min(recorded)} to {max(recorded)} of {run} are recorded, and "
            f"complete checkpoints are at {', '.join(map(str, sorted(candidates)))}: a replay can "
            f"begin {where}"
        )
    return candidates[chosen]


def complete_checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Those of the run's folder, oldest first."""
    return _complete(list_checkpoints(run))


def _candidates(run: Path) -> Iterator[tuple[int, Checkpoint | None]]:
    """With their versions; the model of the configuration is version 0."""
    yield 0, None
    history = read_history(checkpoints_of(run))
    bases = [Path(history.base)] if history is not None and history.base else []
    for checkpoint in _complete([*bases, *list_checkpoints(run)]):
        yield checkpoint.policy_version, checkpoint


def _complete(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    for path in paths:
        try:
            yield read_checkpoint(path)
        except DamagedCheckpointError:
            continue
