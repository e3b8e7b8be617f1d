"""Files of samples: JSON Lines that a crash leaves readable.

samples.jsonl                 a few groups of each step; samples.1.jsonl has the ones before
validation/00000020.jsonl     the responses of the validation of version 20, written whole
                              (the first one and the newest are kept)
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from streamrl.durable_files import write_file
from streamrl.samples.record import Sample

SAMPLES_FILE = "samples.jsonl"
OLDER_FILE = "samples.1.jsonl"
VALIDATION_FOLDER = "validation"
BLOCK_BYTES = 2**18
_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class SampleFile:
    """Removes the samples of `first_step` and later from `samples.jsonl`, then appends to it.

    Past half of `max_bytes` the file becomes `samples.1.jsonl`, replacing the previous one.
    """

    def __init__(self, run: Path, first_step: int, max_bytes: int) -> None:
        self._path, self._older = run / SAMPLES_FILE, run / OLDER_FILE
        self._max_bytes = max_bytes // 2
        for path in (self._path, self._older):
            keep_before(path, first_step)

    def append(self, samples: Iterable[Sample]) -> None:
        """
        Raises:
            OSError: they are not written, and the file is as it was.
        """
        data = text_of(samples).encode(errors="replace")
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(data) > self._max_bytes:
            self._path.replace(self._older)
            size = 0
        with self._path.open("ab", buffering=0) as file:
            try:
                if file.write(data) < len(data):
                    raise OSError(f"{self._path}: the disk is full")
            except OSError:
                file.truncate(size)
                raise


def text_of(samples: Iterable[Sample]) -> str:
    return "".join(json.dumps(msgspec.to_builtins(s), ensure_ascii=False) + "\n" for s in samples)


def write_validation(run: Path, policy_version: int, samples: Sequence[Sample], keep: int) -> None:
    """Write the file of a validation. Keep the newest `keep` files and the first one, with which
    the others are compared.

    Raises:
        OSError: it cannot be written.
    """
    (run / VALIDATION_FOLDER).mkdir(parents=True, exist_ok=True)
    write_file(validation_file(run, policy_version), text_of(samples))
    for older in validation_files(run)[1:-keep]:
        older.unlink(missing_ok=True)


def validation_file(run: Path, policy_version: int) -> Path:
    return run / VALIDATION_FOLDER / f"{policy_version:08d}.jsonl"


def validation_files(run: Path) -> list[Path]:
    """The files of validations, oldest version first; other files in the folder are ignored."""
    found = sorted((run / VALIDATION_FOLDER).glob("*.jsonl"))
    return [path for path in found if path.stem.isdecimal()]


def side_by_side(run: Path, num_prompts: int = 10, num_versions: int | None = None) -> list[Sample]:
    """What validated versions wrote for the first prompts of the newest validation, one response
    each. Responses to a prompt stand together, oldest version first. If there are more versions
    than `num_versions`, the first and the newest ones are taken."""
    files = validation_files(run)
    if num_versions is not None and len(files) > num_versions:
        files = [files[0], *files[len(files) - num_versions + 1 :]]
    versions = [_first_responses(path, num_prompts) for path in files]
    prompts = versions[-1] if versions else {}
    return [responses[i] for i in prompts for responses in versions if i in responses]


def _first_responses(path: Path, num_prompts: int) -> dict[int, Sample]:
    """The first sibling's response by prompt; the last context of a response that has several."""
    found: dict[int, Sample] = {}
    for sample in read_samples(path):
        if sample.prompt_index not in found and len(found) == num_prompts:
            break
        if sample.sibling == 0:
            found[sample.prompt_index] = sample
    return found


def validations_after(run: Path, policy_version: int) -> list[Path]:
    """The files of versions later than this one, which a learner that went back writes again."""
    return [path for path in validation_files(run) if int(path.stem) > policy_version]


def newest_first(run: Path) -> Iterator[Sample]:
    """Yield the samples of a run's steps, newest first. Reads the files from their end, a block at
    a time."""
    for path in (run / SAMPLES_FILE, run / OLDER_FILE):
        for line in lines_backwards(path):
            if (sample := _parsed(line)) is not None:
                yield sample


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The whole lines, last first."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        rest: list[bytes] = []  # Parts of a line that begins earlier, last block first.
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            first, *lines = file.read(end - begin).split(b"\n")
            if lines:
                yield lines.pop() + b"".join(reversed(rest))
                yield from reversed(lines)
                rest = []
            rest.append(first)
            end = begin
        yield b"".join(reversed(rest))


def keep_before(path: Path, first_step: int) -> None:
    """Remove the lines of `first_step` and later, and lines that are cut off or damaged. Truncate
    the file, which works on a full disk, or rewrite it if such lines stand in the middle."""
    if not path.exists():
        return
    num_bytes = num_kept = 0
    is_cut = True
    with path.open("rb") as file:
        for line in file:
            if _is_before(first_step, line):
                is_cut = is_cut and num_kept == num_bytes
                num_kept += len(line)
            num_bytes += len(line)
        if num_kept == num_bytes:
            return
        if is_cut:
            os.truncate(path, num_kept)
            return
        file.seek(0)
        write_file(path, b"".join(line for line in file if _is_before(first_step, line)))


def _is_before(first_step: int, text: bytes) -> bool:
    """Whether it is a whole line of an earlier step."""
    line = parsed_line(text) if text.endswith(b"\n") else None
    return line is not None and bool(line["step"] < first_step)


def parsed_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line that has a step; None if it is damaged."""
    try:
        line = msgspec.json.decode(text)
    except _DAMAGED:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, in its order; a line that was cut off or is damaged is left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if (sample := _parsed(line)) is not None:
                yield sample


def _parsed(line: bytes) -> Sample | None:
    try:
        return msgspec.json.decode(line, type=Sample)
    except _DAMAGED:
        return None
