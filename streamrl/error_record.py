"""Why a process failed, handed to the process that started it.

The parent names a file in the environment; what fails writes one record there. A log's last line
does not tell the reason: libraries print after it, at exit.

Invariant: only a direct child of the process that made the file writes to it.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from streamrl.errors import ConfigError, StreamRLError, exit_code_of
from streamrl.process_environment import PARENT_VARIABLE

ERROR_FILE_VARIABLE = "STREAMRL_ERROR_FILE"
# A pipe takes so much without a reader.
_MAX_BYTES = 2**15


class ErrorRecord(msgspec.Struct, frozen=True):
    """What failed, in one line; `origin` is alike for failures that are alike."""

    exit_code: int
    sentence: str
    origin: str

    @classmethod
    def of(cls, error: BaseException) -> "ErrorRecord":
        """Of several problems of a configuration each has a line.

        >>> ErrorRecord.of(ConfigError("run.x: is wrong\\nrun.y: so is this")).sentence
        'run.x: is wrong; run.y: so is this'
        """
        kind, place = type(error).__name__, _place(error.__traceback__)
        lines = filter(None, (" ".join(line.split()) for line in str(error).splitlines()))
        message = ("; " if isinstance(error, ConfigError) else " ").join(lines)
        if not isinstance(error, StreamRLError):
            message = f"{kind}: {message} ({place})" if message else f"{kind} ({place})"
        return cls(exit_code_of(error), message[: _MAX_BYTES // 8], f"{kind} at {place}")


class ErrorPipe:
    """For one child process: `environment` and `descriptor` are for it, `read` for the parent."""

    def __init__(self) -> None:
        self._read_end, self.descriptor = os.pipe()
        os.set_blocking(self._read_end, False)

    @property
    def environment(self) -> Mapping[str, str]:
        file = f"/dev/fd/{self.descriptor}"
        return {ERROR_FILE_VARIABLE: file, PARENT_VARIABLE: str(os.getpid())}

    def read(self) -> ErrorRecord | None:
        """The record of the child, which has ended; None if it left none."""
        with contextlib.suppress(BlockingIOError, msgspec.MsgspecError):
            return msgspec.json.decode(os.read(self._read_end, _MAX_BYTES), type=ErrorRecord)
        return None

    def __enter__(self) -> "ErrorPipe":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read_end)
        os.close(self.descriptor)


def leave_record(error: BaseException) -> bool:
    """Write the error's record if the parent waits for one; whether it does. Ranks of one parent
    have $RANK in the name of the file."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is None or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        return False
    try:
        Path(os.path.expandvars(file)).write_bytes(msgspec.json.encode(ErrorRecord.of(error)))
    except OSError:
        return False
    return True


def read_record(file: Path) -> ErrorRecord | None:
    """The record of a process that has ended; None if it left none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=ErrorRecord)
    return None


def _place(traceback: TracebackType | None) -> str:
    """FILE:LINE of the innermost frame."""
    if traceback is None:
        return "?"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}"


def sentence_of(exit_code: int, record: ErrorRecord | None) -> str:
    """Why a process ended: its own sentence, else what its exit code tells."""
    if record is not None:
        return record.sentence
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = ", as when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}{hint}"
