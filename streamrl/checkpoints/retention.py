"""Which checkpoints of a run are kept: the newest ones, and the best by a metric.

Invariant: a checkpoint is deleted only after `keep` newer complete ones of its history are on disk,
and none of another history ever.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from streamrl.checkpoints.find import STATE_FILE, foreign, list_checkpoints
from streamrl.checkpoints.history import History
from streamrl.checkpoints.manifest import verify
from streamrl.config.learner import CheckpointSettings
from streamrl.errors import DamagedCheckpointError

log = logging.getLogger(__name__)


def delete_older(
    run: Path, history: History, policy_version: int, settings: CheckpointSettings
) -> None:
    """Those that are not kept once this version is saved; what cannot be deleted is left there."""
    others = set(foreign(run, history, policy_version))
    ours = [path for path in list_checkpoints(run) if path not in others]
    complete = [path for path in ours if _is_complete(path)]
    newest = complete[-settings.keep :]
    kept = {*newest, *_best(complete, settings)}
    for path in ours[: ours.index(newest[0])]:
        if path not in kept:
            with _logged(path):
                shutil.rmtree(path)


def _best(complete: Sequence[Path], settings: CheckpointSettings) -> list[Path]:
    """Of equal ones the newer; one without the metric is none of them."""
    sign = 1 if settings.best_is == "highest" else -1
    scored = [
        (sign * means[settings.best_by], index, path)
        for index, path in enumerate(complete)
        if settings.best_by in (means := _means(path))
    ]
    return [path for *_, path in sorted(scored, reverse=True)[: settings.keep_best]]


def _means(path: Path) -> Mapping[str, float]:
    try:
        means: Mapping[str, float] = json.loads((path / STATE_FILE).read_text())["means"]
    except (OSError, ValueError, KeyError):
        return {}
    return means


def _is_complete(path: Path) -> bool:
    try:
        verify(path, contents=False)
    except DamagedCheckpointError:
        return False
    return True


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("cannot delete the older checkpoint %s: %s", path, error)
