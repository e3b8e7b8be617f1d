"""Decides which checkpoints of a run are kept: the newest, and the best by a metric.

Invariant: a checkpoint is deleted only after `keep` newer complete ones of its history are on disk;
those of other histories are never deleted.
"""

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streamrl.checkpoints.find import STATE_FILE, foreign, list_checkpoints, version_of
from streamrl.checkpoints.history import History
from streamrl.checkpoints.manifest import verify
from streamrl.config.learner import CheckpointSettings
from streamrl.errors import DamagedCheckpointError, UnreadableCheckpointError

log = logging.getLogger(__name__)


class Validated(NamedTuple):
    """The metrics of each validated version, and the versions being validated."""

    metrics: Mapping[int, Mapping[str, float]] = {}
    pending: Collection[int] = ()


def delete_older(
    run: Path,
    history: History,
    policy_version: int,
    settings: CheckpointSettings,
    validated: Validated,
) -> None:
    """Delete the checkpoints that are not kept once this version is saved; what cannot be deleted
    stays.

    Those of versions being validated are kept, since they may be the best; so may one that cannot
    be read at present.
    """
    try:
        others = set(foreign(run, history, policy_version))
        ours = [path for path in list_checkpoints(run) if path not in others]
    except UnreadableCheckpointError as error:
        log.warning("%s; older checkpoints stay", error)
        return
    complete, unread = [], set[Path]()
    for path in ours:
        try:
            verify(path, contents=False)
            complete.append(path)
        except UnreadableCheckpointError:
            unread.add(path)
        except DamagedCheckpointError:
            continue
    if not complete:
        # Somebody who cleaned up the disk has removed the one just saved.
        return
    newest = complete[-settings.keep :]
    kept = {*unread, *newest, *_best(complete, settings, validated)}
    kept |= {path for path in complete if version_of(path) in validated.pending}
    for path in ours[: ours.index(newest[0])]:
        if path not in kept:
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("cannot delete the older checkpoint %s: %s", path, error)


def _best(
    complete: Sequence[Path], settings: CheckpointSettings, validated: Validated
) -> list[Path]:
    """Ties go to the newer one; one without the metric is never best."""
    sign = 1 if settings.best_is == "highest" else -1
    means = [{**_means(path), **validated.metrics.get(version_of(path), {})} for path in complete]
    scored = [
        (sign * known[settings.best_by], index, path)
        for index, (path, known) in enumerate(zip(complete, means, strict=True))
        if settings.best_by in known
    ]
    return [path for *_, path in sorted(scored, reverse=True)[: settings.keep_best]]


def _means(path: Path) -> Mapping[str, float]:
    try:
        means: Mapping[str, float] = json.loads((path / STATE_FILE).read_text())["means"]
    except (OSError, ValueError, KeyError):
        return {}
    return means
