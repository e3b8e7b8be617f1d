"""Finds the checkpoint that a run continues from: the newest complete one of the surviving history.

Invariant: a checkpoint is returned only after each of its files has been compared with its manifest
(`contents=False`: their sizes), and only if the run's history contains it.

A launch checks whether the run can be resumed before it writes anything, by sizes alone; the
learner checks the contents of the checkpoint that it has chosen. A learner that would start from
nothing on the buffer of an existing run, and so abandon all its steps, is refused
(`require_new_run`) before anything is changed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.checkpoints.history import History, read_history
from streamrl.checkpoints.manifest import MANIFEST_FILE, verify
from streamrl.config import RunConfig
from streamrl.config.learner import LoraSettings
from streamrl.config.model import ModelSettings
from streamrl.errors import (
    ConfigError,
    DamagedCheckpointError,
    OtherReleaseError,
    UnreadableCheckpointError,
)
from streamrl.model_folder import local_folder
from streamrl.types import Books

PREFIX = "step-"
STATE_FILE = "state.json"
FORMAT = 4
"""The format of state.json; a checkpoint of another format is refused."""


class Damage(NamedTuple):
    """A checkpoint that was skipped; `sentence` says what is wrong with which file."""

    policy_version: int
    sentence: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `record` is the content of its state.json, `damaged` are newer ones of
    the run that `newest` has skipped, newest first."""

    path: Path
    policy_version: int
    books: Books
    history: History
    record: dict[str, Any]
    damaged: tuple[Damage, ...] = ()


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def path_of(run: Path, policy_version: int) -> Path:
    return checkpoints_of(run) / f"{PREFIX}{policy_version:08d}"


def version_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def list_checkpoints(run: Path) -> list[Path]:
    """Every folder of a checkpoint in the run, oldest first, damaged or not. Raises
    UnreadableCheckpointError if their folder is there and cannot be read."""
    folder = checkpoints_of(run)
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableCheckpointError.of(folder, error) from error
    named = (p for p in paths if p.name.startswith(PREFIX))
    return sorted((p for p in named if p.name.removeprefix(PREFIX).isdigit()), key=version_of)


def newest(run: Path, *, contents: bool = True) -> Checkpoint | None:
    """The checkpoint that the run in this folder continues from; None if there is none yet.

    It is the newest complete one of the run's history; the one that the run started from counts,
    wherever it is. An unreadable one is not skipped, since its steps would be abandoned.

    Raises:
        ConfigError: there are checkpoints, and none is complete.
        UnreadableCheckpointError: it cannot be known whether a newer one is complete.
        OtherReleaseError: the newest one has another format.
    """
    history = read_history(checkpoints_of(run))
    damaged: tuple[Damage, ...] = ()
    for version, path in sorted(_candidates(run, history), reverse=True):
        if history is not None and _belongs(path, history) is False:
            continue
        try:
            return replace(read_checkpoint(path, contents=contents), damaged=damaged)
        except DamagedCheckpointError as error:
            damaged = (*damaged, Damage(version, str(error)))
    if damaged:
        sentences = "; ".join(damage.sentence for damage in damaged)
        raise ConfigError(
            f"run.resume: no checkpoint of {run} is complete: {sentences}; name another checkpoint "
            "to go on from, or start the run anew with --new"
        )
    return None


def _candidates(run: Path, history: History | None) -> Iterator[tuple[int, Path]]:
    """Candidates with their versions."""
    for path in list_checkpoints(run):
        yield version_of(path), path
    if history is not None and history.base:
        base = Path(history.base)
        if base.parent == checkpoints_of(run).absolute():
            return
        version = history.segments[-1].policy_version
        # If the run's folder was moved or fetched, it is here.
        if base.exists() or not path_of(run, version).exists():
            yield version, base


def read_checkpoint(path: Path, *, contents: bool = True) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        DamagedCheckpointError: a file is missing or has changed.
        UnreadableCheckpointError: a file is there and cannot be read.
        OtherReleaseError: it has another format.
    """
    _require_format(path)
    verify(path, contents=contents)
    try:
        record: dict[str, Any] = json.loads((path / STATE_FILE).read_text())
        return Checkpoint(
            path,
            policy_version=record["policy_version"],
            books=msgspec.convert(record["books"], Books, str_keys=True, strict=False),
            history=msgspec.convert(record["history"], History),
            record=record,
        )
    except OSError as error:
        raise UnreadableCheckpointError.of(path / STATE_FILE, error) from error
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise DamagedCheckpointError.of(path, STATE_FILE, "cannot be read") from error


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is a checkpoint of a run, damaged or not, rather than just a model."""
    return (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file()


def is_taken(run: Path, resume: Path) -> bool:
    """Whether the run in this folder has already continued from the checkpoint that `run.resume`
    names; it is used once, and may be gone since."""
    history = read_history(checkpoints_of(run))
    return history is not None and history.resume == str(resume)


def foreign(run: Path, history: History, last_version: int) -> Iterator[Path]:
    """The checkpoints in the run's folder that do not belong to a history at this version.

    One that does not say whose it is may belong to it up to this version.
    """
    for path in list_checkpoints(run):
        belongs = _belongs(path, history)
        if belongs is False or (belongs is None and version_of(path) > last_version):
            yield path


def _belongs(path: Path, history: History) -> bool | None:
    """Whether the history contains the checkpoint, damaged or not; None if it does not say."""
    try:
        record = json.loads((path / STATE_FILE).read_text())
        of = msgspec.convert(record["history"], History)
        return history.contains(of.learner_id, record["policy_version"])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None


def _require_format(path: Path) -> None:
    """Check the format before the manifest, which a checkpoint of another release may lack."""
    try:
        written = json.loads((path / STATE_FILE).read_text()).get("format", 1)
    except (OSError, ValueError, AttributeError):
        return
    if written != FORMAT:
        what, remedy = f"run.resume: the checkpoint {path}", "start the run anew with --new"
        raise OtherReleaseError.of(what, written, FORMAT, remedy)


def require_steps_left(checkpoint: Checkpoint, max_steps: int) -> None:
    """Raise ConfigError if the checkpoint is beyond the run's last step."""
    step = checkpoint.policy_version
    if step > max_steps:
        raise ConfigError(
            f"run.max_steps: was {max_steps}, and {checkpoint.path} is of step {step}: it must be "
            f"above {step} to go on"
        )


def base_digest(model: ModelSettings) -> str:
    """Digest of the weights that an adapter is trained on, and that a reference policy has; "" if
    unknown."""
    folder = local_folder("model.path", model.path)
    return "" if folder is None else folder.digest


def has_other_base(checkpoint: Checkpoint, model: ModelSettings) -> bool:
    """Whether the run of the checkpoint is known to have begun with other weights than these."""
    base = checkpoint.record.get("base")
    return bool(base) and base_digest(model) not in ("", base)


def require_same_adapter(
    checkpoint: Checkpoint, model: ModelSettings, lora: LoraSettings | None
) -> None:
    """Raise ConfigError if its adapter was trained with another scale, or on other weights."""
    if lora is None:
        return
    alpha = checkpoint.record.get("lora_alpha")
    if has_other_base(checkpoint, model):
        raise ConfigError(
            f"model.path: the weights of {model.path} are not those that the adapter of "
            f"{checkpoint.path} was trained on: with others it makes another policy; name the "
            "model that it began with"
        )
    if alpha not in (None, lora.alpha):
        raise ConfigError(
            f"learner.lora.alpha: was {lora.alpha:g}, and the adapter of {checkpoint.path} was "
            f"trained with {alpha:g}: another scale makes another policy of it; set it to "
            f"{alpha:g} to go on"
        )


def require_steps_to_launch(config: RunConfig, *, resume: bool, new: bool) -> Checkpoint | None:
    """The checkpoint that a launch with these flags continues from, if any.

    Raises:
        ConfigError: see `require_steps_left`, `require_same_adapter`, `newest`, `read_checkpoint`.
    """
    match config.run.resume:
        case Path() as named if not (resume and is_taken(config.run.path, named)):
            checkpoint: Checkpoint | None = read_checkpoint(named, contents=False)
        case setting if resume or (setting == "auto" and not new):
            checkpoint = newest(config.run.path, contents=False)
        case _:
            checkpoint = None
    if checkpoint is not None:
        require_steps_left(checkpoint, config.run.max_steps)
        require_same_adapter(checkpoint, config.model, config.learner.lora)
    return checkpoint


def require_new_run(config: RunConfig, learner_term: int, version: int) -> None:
    """Raise ConfigError if a learner has already attached to the buffer with this term and
    version."""
    if not learner_term:
        return
    folder = config.run.path
    remedy = (
        f"stop the buffer and move {folder} aside, as launch --new does"
        if config.buffer.binds_url
        else "delete it there with launch --new or streamrl buffer books --forget"
    )
    raise ConfigError(
        f"run.name: the buffer holds a run {config.run.name} at version {version} "
        f"already: go on with --resume, or, to start anew, {remedy}, or choose another run.name"
    )
