"""Files of samples: JSON Lines that a crash leaves readable.

samples.jsonl                 of a few groups of each step; samples.1.jsonl what came before it
validation/00000020.jsonl     the responses of the validation of version 20, written whole
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from streamrl.durable_files import write_file
from streamrl.samples.record import Sample, as_json

SAMPLES_FILE = "samples.jsonl"
OLDER_FILE = "samples.1.jsonl"
VALIDATION_FOLDER = "validation"


def text_of(samples: Iterable[Sample]) -> str:
    """A line for each."""
    return "".join(json.dumps(as_json(s), ensure_ascii=False) + "\n" for s in samples)


def write_validation(run: Path, policy_version: int, samples: Sequence[Sample], keep: int) -> Path:
    """The file of this validation; the oldest beyond `keep` are deleted.

    Raises:
        OSError: it cannot be written.
    """
    folder = run / VALIDATION_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = validation_file(run, policy_version)
    write_file(path, text_of(samples))
    for older in validation_files(run)[:-keep]:
        older.unlink(missing_ok=True)
    return path


def validation_file(run: Path, policy_version: int) -> Path:
    return run / VALIDATION_FOLDER / f"{policy_version:08d}.jsonl"


def validation_files(run: Path) -> list[Path]:
    """Those that there are, oldest version first."""
    return sorted((run / VALIDATION_FOLDER).glob("[0-9]*.jsonl"))


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, in its order; a line that was cut off or is damaged is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=Sample)
            except msgspec.MsgspecError:
                continue
