"""The record of a step on disk: the groups that one rank has trained, in the parts they came in.

    RUN/record/step-00000012.rank-00.zst

A file is one zstd frame with a checksum, around one message of `streamrl.wire`. Invariant: a file
that has its name is whole; a step is recorded if each rank's file is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, groupby
from operator import itemgetter
from pathlib import Path

import zstandard
from msgspec import Struct

from streamrl import wire
from streamrl.errors import ConfigError, WireError
from streamrl.types import GroupHeader, TrajectoryGroup
from streamrl.types.packed import PackedGroup, pack

RECORD_FOLDER = "record"
_SUFFIX = ".zst"
_LEVEL = 3
_MAX_BYTES = 2**40


class RecordedPart(Struct, frozen=True, array_like=True):
    """`headers` are those of the part, of all ranks; `payloads` the encoded groups of this one."""

    headers: tuple[GroupHeader, ...]
    payloads: tuple[bytes, ...]

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


class Part(Struct, frozen=True):
    """A part of a batch, its groups of all ranks in the order of the headers."""

    headers: tuple[GroupHeader, ...]
    groups: tuple[TrajectoryGroup, ...]


def path_of(run: Path, step: int, rank: int) -> Path:
    return run / RECORD_FOLDER / f"step-{step:08d}.rank-{rank:02d}{_SUFFIX}"


def place_of(path: Path) -> tuple[int, int] | None:
    """Step and rank that the name of a file says; None for another file."""
    words = path.name.removesuffix(_SUFFIX).replace(".", "-").split("-")
    if len(words) != 4 or not (words[1].isdigit() and words[3].isdigit()):
        return None
    return int(words[1]), int(words[3])


def files_of(run: Path) -> Iterator[tuple[int, int, Path]]:
    """Step, rank and path of each file, in that order."""
    found = ((place_of(path), path) for path in (run / RECORD_FOLDER).glob(f"step-*{_SUFFIX}"))
    yield from sorted((*place, path) for place, path in found if place is not None)


def encode(record: StepRecord) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(wire.encode(record))


def read(path: Path) -> StepRecord:
    """
    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        return wire.decode(data, StepRecord, max_bytes=_MAX_BYTES)
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


def read_step(files: Sequence[Path]) -> tuple[Part, ...]:
    """The parts of a step, from the files of all ranks.

    Raises:
        ConfigError: one is damaged, or a rank's is missing.
    """
    records = [read(path) for path in files]
    first = records[0]
    if len(records) != first.num_ranks:
        raise ConfigError(
            f"{files[0].parent}: step {first.step} was trained by {first.num_ranks} ranks, and the "
            f"records of {len(records)} are there"
        )
    return tuple(_merged([record.parts[i] for record in records]) for i in range(len(first.parts)))


def _merged(parts: Sequence[RecordedPart]) -> Part:
    payloads = (payload for part in parts for payload in part.payloads)
    packed = (wire.decode(payload, PackedGroup, max_bytes=_MAX_BYTES) for payload in payloads)
    by_index = {one.prompt_index: one.group() for one in packed}
    headers = parts[0].headers
    return Part(headers, tuple(by_index[header.prompt_index] for header in headers))
