"""Every error StreamRL raises on purpose, and the sentence a person reads.

Invariant: an error names the field or the peer, what it was, and what is allowed. Each family has
an exit code, by which a supervisor decides. Why a process failed is handed to the process that
started it: the parent names a file in the environment, and what fails writes one record there,
since libraries print after a log's last line, at exit. Only a direct child of the process that made
the file writes to it.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from types import TracebackType

EXIT_CRASHED = 1
EXIT_CONFIG = 2
EXIT_FENCED = 3
EXIT_ROLLOUTS = 4
EXIT_UNREACHABLE = 5
EXIT_DIVERGED = 6
# More names are neither compared nor listed: it would take seconds, and nobody reads them.
MAX_LISTED = 1000
ERROR_FILE_VARIABLE = "STREAMRL_ERROR_FILE"
PARENT_VARIABLE = "STREAMRL_PARENT_PID"
"""Of a process that a launcher has started: the launcher's id."""
# A pipe takes so much without a reader.
_MAX_BYTES = 2**15


class StreamRLError(Exception):
    """Root of the errors raised on purpose."""


class ConfigError(StreamRLError):
    """The configuration, or a file it names, cannot be used as it stands."""


class OtherReleaseError(ConfigError):
    """A journal, a checkpoint or a run in Redis has another format than this release's."""

    @classmethod
    def of(cls, what: str, found: object, known: int, remedy: str) -> "OtherReleaseError":
        """`what` has the format `found`; this release knows the format `known`."""
        return cls(
            f"{what} has format {found}, and this release knows format {known}: another release "
            f"of StreamRL wrote it; {remedy}, or go on with that release"
        )


class HandedOverError(StreamRLError):
    """A buffer daemon's journal has been changed by another one, or has lost what it wrote."""


class DamagedCheckpointError(ConfigError):
    """A file of a checkpoint is missing, or does not hold what was written."""

    @classmethod
    def of(cls, checkpoint: object, file: str, reason: str) -> "DamagedCheckpointError":
        """With what is wrong with the file of this checkpoint, a folder."""
        return cls(f"the checkpoint {checkpoint} is damaged: {file} {reason}")


class CheckpointWriteError(StreamRLError):
    """A checkpoint cannot be written (a full disk): nothing is acknowledged, and it is retried."""


class UnknownGeneratorError(ConfigError):
    """The generator that a command names does not report to the buffer."""

    @classmethod
    def among(cls, generator_id: str, known: Iterable[str]) -> "UnknownGeneratorError":
        """With what was probably meant among the `known` ids."""
        names = frozenset(known)
        if len(names) > MAX_LISTED:
            hint = f"{len(names)} others do"
        else:
            hint = did_you_mean(generator_id, names) if names else "no generator has reported"
        return cls(f"no generator {generator_id!r} reports to this buffer: {hint}")


class RolloutError(StreamRLError):
    """One rollout failed: recorded as data, its group dropped with a reason; never fatal."""


class LostAgentError(RolloutError):
    """An agent ended, or fell silent, before it closed its episode."""


class RewardError(RolloutError):
    """A reward did not score a group; `reward` is its name."""

    def __init__(self, sentence: str, reward: str) -> None:
        super().__init__(sentence)
        self.reward = reward


class DivergedError(StreamRLError):
    """Gradients stay not finite: going on, or starting again, would train nothing."""


class TransportError(StreamRLError):
    """A peer did not answer in time or answered nonsense; retried under a deadline."""


class UnreachableBufferError(TransportError):
    """The buffer does not answer; all that the learner has trained is saved."""


class WireError(TransportError):
    """A message could not be decoded."""


class MessageTooLargeError(WireError):
    """A message is larger than its reader allows; nothing of it was decoded."""


class SchemaVersionError(WireError):
    """A message was written by another schema version."""


class CorruptMessageError(WireError):
    """A message is truncated, fails its checksum, or breaks the rules of its type."""


class BufferFullError(TransportError):
    """The buffer's memory stayed full for as long as a put waits; the group was not taken in."""


class LedgerError(StreamRLError):
    """A call that the ledger refuses; its state is unchanged."""


class UnknownLeaseError(LedgerError):
    """The lease was never granted, has expired, or was given back."""


class DuplicateGroupError(LedgerError):
    """Another group was already put under this lease."""


class LostMemoryError(LedgerError):
    """The buffer came back with an older state than this learner's: it has lost memory."""


class FencedError(LedgerError):
    """A newer learner attached; this one must stop."""


class StorageError(TransportError):
    """The buffer cannot write a change (a full disk): it is refused, nothing is lost; retried."""


class UnreadableCheckpointError(TransportError):
    """The storage of a checkpoint does not give a file, which says nothing about what it holds."""

    @classmethod
    def of(cls, path: object, error: OSError) -> "UnreadableCheckpointError":
        return cls(
            f"{path} cannot be read ({error.strerror or error}): see to its storage and its "
            "permissions, or name another checkpoint in run.resume"
        )


class WeightTransferError(TransportError):
    """A weight update did not reach a receiver within its deadline."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the command, as Ctrl-C does."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


_FAMILIES: tuple[tuple[int, type[StreamRLError]], ...] = (
    (EXIT_CONFIG, ConfigError),
    (EXIT_FENCED, FencedError),
    (EXIT_ROLLOUTS, RolloutError),
    (EXIT_UNREACHABLE, TransportError),
    (EXIT_DIVERGED, DivergedError),
    (EXIT_CRASHED, StreamRLError),
)


def exit_code_of(error: BaseException) -> int:
    """That of the error's family; a package that is missing is a matter of configuration.

    >>> exit_code_of(ConfigError("run.x: is wrong")), exit_code_of(KeyError("x"))
    (2, 1)
    """
    if isinstance(error, ImportError):
        return EXIT_CONFIG
    return next((code for code, family in _FAMILIES if isinstance(error, family)), EXIT_CRASHED)


def error_of(exit_code: int, sentence: str) -> StreamRLError:
    """The error of a process that ended with this exit code, to be raised in another one."""
    return dict(_FAMILIES).get(exit_code, StreamRLError)(sentence)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Closing words for an unknown-name error: the nearest allowed name, or all of them.

    >>> did_you_mean("zqm", ["zmq", "redis"])
    "did you mean 'zmq'?"
    >>> did_you_mean("x", ["zmq", "redis"])
    'allowed: redis, zmq'
    """
    names = sorted(allowed)
    close = nearest(name, names)
    return f"allowed: {', '.join(names) or 'none'}" if close is None else f"did you mean {close!r}?"


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name that is most like this one, in whatever case; None if none is like it.

    Args:
        likeness: the least that counts, from 0 to 1.
    """
    by_lower = {other.lower(): other for other in names}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[close[0]] if close else None


def similar_path(path: Path) -> str:
    """The file of a like name in the folder of one that is not there, as a question; "" without
    one."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        if not path.exists():
            names = [file.name for file in islice(path.parent.iterdir(), MAX_LISTED)]
    close = nearest(path.name, names)
    return "" if close is None else f"; did you mean '{path.with_name(close)}'?"


@contextlib.contextmanager
def prefixed(setting: str) -> Iterator[None]:
    """Around what refuses a setting below this one by its own name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}.{error}") from error


@contextlib.contextmanager
def reading(path: Path, setting: str = "") -> Iterator[None]:
    """Around what reads a file that a person has named, by this setting. Raises ConfigError if it
    cannot be read, or is no text."""
    owner = f"{setting}: " if setting else ""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{owner}{path} is not UTF-8: {error}") from error
    except OSError as error:
        reason = f"{error.strerror or error}{similar_path(path)}"
        raise ConfigError(f"{owner}cannot read {path}: {reason}") from error


@dataclass(frozen=True)
class ErrorRecord:
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

    @classmethod
    def read(cls, data: bytes) -> "ErrorRecord | None":
        """Of JSON; None of what is no record."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(**json.loads(data))
        return None


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
        with contextlib.suppress(BlockingIOError):
            return ErrorRecord.read(os.read(self._read_end, _MAX_BYTES))
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
        Path(os.path.expandvars(file)).write_text(json.dumps(asdict(ErrorRecord.of(error))))
    except OSError:
        return False
    return True


def read_record(file: Path) -> ErrorRecord | None:
    """The record of a process that has ended; None if it left none."""
    with contextlib.suppress(OSError):
        return ErrorRecord.read(file.read_bytes())
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
