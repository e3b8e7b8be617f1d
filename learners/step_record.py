"""The record of a step on disk: the groups that one rank has trained, in the parts they came in.

    RUN/record/step-00000012.rank-00.zst

A file is one zstd frame with a checksum, around one message of `streamrl.wire`.

    RUN/record/settings-00000012.yaml   of step 12 and those after it

A learner that records writes its configuration where it begins, before the record of its first
step, unless the steps before were made by the same.

Invariant: a file that has its name is whole; a step is recorded if each rank's file is there. A
checkpoint is saved only once the records of its steps are on disk. A learner forgets the steps that
are not of its history, whether it records or not, and one that was taken over records no more.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, groupby
from operator import itemgetter
from pathlib import Path

import zstandard
from msgspec import Struct

from learners.optimizer import learning_rate
from streamrl import wire
from streamrl.checkpoints.find import checkpoints_of
from streamrl.checkpoints.history import History, survives
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.learner import ProfilerSettings
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.load import with_overrides
from streamrl.config.loading.rendering import values_of
from streamrl.durable_files import sync, write_file
from streamrl.errors import ConfigError, OtherReleaseError, SchemaVersionError, WireError
from streamrl.types import GroupHeader, TrajectoryGroup
from streamrl.types.packed import PackedGroup, pack

log = logging.getLogger(__name__)

RECORD_FOLDER = "record"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.zst")
_LEVEL = 3
_MAX_BYTES = 2**40


class RecordedPart(Struct, frozen=True, array_like=True):
    headers: tuple[GroupHeader, ...]
    """Of all ranks."""
    payloads: tuple[bytes, ...]
    """The encoded groups of this one."""

    @classmethod
    def of(
        cls, headers: Sequence[GroupHeader], groups: Sequence[TrajectoryGroup]
    ) -> "RecordedPart":
        return cls(tuple(headers), tuple(wire.encode(pack(group)) for group in groups))


class StepRecord(Struct, frozen=True):
    """What one rank has trained for version `step`."""

    step: int
    num_ranks: int
    parts: tuple[RecordedPart, ...]


class ReplayPart(Struct, frozen=True):
    """A part of a batch, its groups of all ranks in the order of the headers."""

    headers: tuple[GroupHeader, ...]
    groups: tuple[TrajectoryGroup, ...]


def path_of(run: Path, step: int, rank: int) -> Path:
    return run / RECORD_FOLDER / f"step-{step:08d}.rank-{rank:02d}.zst"


def files_of(run: Path) -> Iterator[tuple[int, int, Path]]:
    """Step, rank and path of each file, in that order."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run / RECORD_FOLDER).glob("step-*"))
    yield from sorted((int(name[1]), int(name[2]), path) for name, path in found if name)


def encode(record: StepRecord) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(wire.encode(record))


def read(path: Path) -> StepRecord:
    """Raise ConfigError if it cannot be read."""
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        return wire.decode(data, StepRecord, max_bytes=_MAX_BYTES)
    except SchemaVersionError as error:
        raise OtherReleaseError(
            f"another release of StreamRL recorded {path}; replay it with that release"
        ) from error
    except (OSError, zstandard.ZstdError, WireError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def recorded_steps(run: Path) -> Mapping[int, tuple[Path, ...]]:
    """The files of each step, by rank, from the first step on that all ranks have: each drops its
    own oldest ones. What a rank lacks after that is found out when the step is read."""
    files = groupby(files_of(run), key=itemgetter(0))
    steps = {step: tuple(path for *_, path in of_step) for step, of_step in files}
    return dict(dropwhile(_lacks_a_rank, steps.items())) or steps


def _lacks_a_rank(step_files: tuple[int, Sequence[Path]]) -> bool:
    _, files = step_files
    try:
        return len(files) < read(files[0]).num_ranks
    except ConfigError:
        return False


def read_step(files: Sequence[Path]) -> tuple[ReplayPart, ...]:
    """The parts of a step, by the files of all ranks; ConfigError if one is damaged or missing."""
    records = [read(path) for path in files]
    first = records[0]
    if len(records) != first.num_ranks:
        raise ConfigError(
            f"{files[0].parent}: step {first.step} was trained by {first.num_ranks} ranks, and the "
            f"records of {len(records)} are there"
        )
    return tuple(_merged([record.parts[i] for record in records]) for i in range(len(first.parts)))


def _merged(parts: Sequence[RecordedPart]) -> ReplayPart:
    payloads = (payload for part in parts for payload in part.payloads)
    packed = (wire.decode(payload, PackedGroup, max_bytes=_MAX_BYTES) for payload in payloads)
    by_index = {one.prompt_index: one.group() for one in packed}
    headers = parts[0].headers
    return ReplayPart(headers, tuple(by_index[header.prompt_index] for header in headers))


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


def record_settings(config: RunConfig, first_step: int) -> None:
    """Write the configuration of this step and those after it; OSError if it cannot be written."""
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
    return config.with_values(
        run={"folder": folder.folder, "name": folder.name},
        learner={"num_ranks": 1, "profiler": ProfilerSettings()},
        tracking={"samples": {"num_groups": 0}},
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


def forget(run: Path, first_step: int) -> None:
    """Remove what is recorded of this step and later ones, by whatever rank, and their settings;
    OSError if a file cannot be removed."""
    for unfinished in (run / RECORD_FOLDER).glob(".*.unfinished"):
        unfinished.unlink()
    steps = [(step, path) for step, _, path in files_of(run)]
    for step, path in (*steps, *settings_files(run).items()):
        if step >= first_step:
            path.unlink()


class Recorder:
    """Of one rank of so many, of the learner that makes this history; keeps what it writes within
    `buffer.record_max_bytes`. While the disk is full records wait in memory. The compute thread
    calls `add`, the loop the rest."""

    def __init__(
        self, config: RunConfig, history: History, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._run = config.run.path
        self._history = history
        self._rank = rank
        self._num_ranks = num_ranks
        self._max_bytes = config.buffer.record_max_bytes // num_ranks
        self._sizes: dict[Path, int] = {}
        self._pending: tuple[tuple[Path, bytes], ...] = ()
        self._unsynced: tuple[Path, ...] = ()
        self._has_dropped = False

    def add(
        self,
        step: int,
        parts: Sequence[tuple[Sequence[GroupHeader], Sequence[TrajectoryGroup]]],
    ) -> None:
        """The groups of this rank that made this version, in the parts they were trained in."""
        if not self._sizes:
            # Of the steps before; those of ranks that are gone are the first rank's.
            self._sizes = {
                path: path.stat().st_size
                for _, rank, path in files_of(self._run)
                if rank == self._rank or (self._rank == 0 and rank >= self._num_ranks)
            }
        recorded = tuple(RecordedPart.of(headers, groups) for headers, groups in parts)
        data = encode(StepRecord(step, self._num_ranks, recorded))
        was_pending = bool(self._pending)
        self._pending = (*self._pending, (path_of(self._run, step, self._rank), data))
        try:
            self._write()
        except OSError as error:
            if not was_pending:
                log.warning("the record of step %d waits in memory: %s", step, error)
        self._drop_oldest(step)

    def flush(self) -> None:
        """Wait until the record of each step is on disk.

        Raises:
            OSError: it is full, for example.
        """
        self._write()
        unsynced = self._unsynced
        for path in unsynced:
            if path in self._sizes:
                sync(path)
        if unsynced:
            sync(self._run / RECORD_FOLDER)
        self._unsynced = self._unsynced[len(unsynced) :]

    def _write(self) -> None:
        while self._pending:
            path, data = self._pending[0]
            if self._write_one(path, data):
                self._sizes = {**self._sizes, path: len(data)}
                self._unsynced = (*self._unsynced, path)
            self._pending = self._pending[1:]

    def _write_one(self, path: Path, data: bytes) -> bool:
        """Whether it is written: not where another learner goes on with the run."""
        # Ranks that share their trajectories write the same file.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(data)
            if survives(checkpoints_of(self._run), self._history):
                unfinished.replace(path)
                return True
        finally:
            unfinished.unlink(missing_ok=True)
        log.warning("another learner goes on with %s; this one records no step", self._run)
        return False

    def _drop_oldest(self, newest: int) -> None:
        total = sum(self._sizes.values())
        while total > self._max_bytes and len(self._sizes) > 1:
            oldest = min(self._sizes)
            total -= self._sizes[oldest]
            oldest.unlink(missing_ok=True)
            self._sizes = {path: n for path, n in self._sizes.items() if path != oldest}
            if not self._has_dropped:
                self._has_dropped = True
                log.warning(
                    "record/ has reached buffer.record_max_bytes at step %d: from now on the "
                    "oldest steps are dropped, and a replay begins at a later checkpoint",
                    newest,
                )
