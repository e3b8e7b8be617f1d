"""All errors that StreamRL raises on purpose, and the sentences that a person reads.

Invariant: an error names the field or the peer, its value, and what is allowed. Each family of
errors has an exit code, by which a supervisor decides. A failed process tells the process that
started it why: the parent names a file in the environment, and the child writes one record to it.
(A log's last line would not do, since libraries print at exit.) Only a direct child of the process
that made the file writes to it.
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
"""The environment variable in which a launcher gives its process id to the processes it starts."""
# A pipe holds at least this much without a reader.
_MAX_BYTES = 2**15


class StreamRLError(Exception):
    """Base class of the errors raised on purpose."""


class ConfigError(StreamRLError):
    """The configuration, or a file that it names, cannot be used."""


class OtherReleaseError(ConfigError):
    """A journal, a checkpoint, a run in Redis or a recorded step is in another release's format."""

    @classmethod
    def of(cls, what: str, found: object, known: int, remedy: str) -> "OtherReleaseError":
        """`what` has the format `found`; this release knows the format `known`."""
        return cls(
            f"{what} has format {found}, and this release knows format {known}: another release "
            f"of StreamRL wrote it; {remedy}, or go on with that release"
        )


class HandedOverError(StreamRLError):
    """Another daemon changed this buffer daemon's journal, or the journal lost what it wrote."""


class DamagedCheckpointError(ConfigError):
    """A file of a checkpoint is missing or has other content than was written."""

    @classmethod
    def of(cls, checkpoint: object, file: str, reason: str) -> "DamagedCheckpointError":
        """The error for this file of a checkpoint folder."""
        return cls(f"the checkpoint {checkpoint} is damaged: {file} {reason}")


class CheckpointWriteError(StreamRLError):
    """A checkpoint cannot be written (full disk): nothing is acknowledged, and writing is
    retried."""


class UnknownGeneratorError(ConfigError):
    """The generator named in a command does not report to the buffer."""

    @classmethod
    def among(cls, generator_id: str, known: Iterable[str]) -> "UnknownGeneratorError":
        """The error, with what was probably meant among the `known` ids."""
        names = frozenset(known)
        if len(names) > MAX_LISTED:
            hint = f"{len(names)} others do"
        else:
            hint = did_you_mean(generator_id, names) if names else "no generator has reported"
        return cls(f"no generator {generator_id!r} reports to this buffer: {hint}")


class RolloutError(StreamRLError):
    """One rollout failed: its group is dropped with a reason and recorded; never fatal."""


class LostAgentError(RolloutError):
    """An agent ended, or fell silent, before it closed its episode."""


class RewardError(RolloutError):
    """A reward failed to score a group; `reward` is its name."""

    def __init__(self, sentence: str, reward: str) -> None:
        super().__init__(sentence)
        self.reward = reward


class DivergedError(StreamRLError):
    """Gradients stay non-finite: neither continuing nor restarting would train anything."""


class TransportError(StreamRLError):
    """A peer did not answer in time, or answered nonsense; retried until a deadline."""


class UnreachableBufferError(TransportError):
    """The buffer does not answer; everything that the learner has trained is saved."""


class WireError(TransportError):
    """A message could not be decoded."""


class MessageTooLargeError(WireError):
    """A message is larger than its reader allows; none of it was decoded."""


class SchemaVersionError(WireError):
    """A message was written by another schema version."""


class CorruptMessageError(WireError):
    """A message is truncated, fails its checksum, or breaks the rules of its type."""


class BufferFullError(TransportError):
    """The buffer's memory stayed full for as long as a put waits; the group was not accepted."""


class LedgerError(StreamRLError):
    """The ledger refused a call; its state is unchanged."""


class UnknownLeaseError(LedgerError):
    """The lease was never granted, has expired, or was given back."""


class DuplicateGroupError(LedgerError):
    """Another group was already put under this lease."""


class LostMemoryError(LedgerError):
    """The buffer restarted with an older state than this learner knows: it has lost memory."""


class FencedError(LedgerError):
    """A newer learner attached; this one must stop."""


class StorageError(TransportError):
    """The buffer cannot write a change (full disk): the change is refused, nothing is lost;
    retried."""


class UnreadableCheckpointError(TransportError):
    """A checkpoint's file cannot be read from its storage; its content may be intact."""

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
    """The exit code of the error's family; a missing package counts as a configuration error.

    >>> exit_code_of(ConfigError("run.x: is wrong")), exit_code_of(KeyError("x"))
    (2, 1)
    """
    if isinstance(error, ImportError):
        return EXIT_CONFIG
    return next((code for code, family in _FAMILIES if isinstance(error, family)), EXIT_CRASHED)


def error_of(exit_code: int, sentence: str) -> StreamRLError:
    """The error of a process that ended with this exit code, to be raised in another process."""
    return dict(_FAMILIES).get(exit_code, StreamRLError)(sentence)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The end of an unknown-name error: the nearest allowed name, or all allowed names.

    >>> did_you_mean("zqm", ["zmq", "redis"])
    "did you mean 'zmq'?"
    >>> did_you_mean("x", ["zmq", "redis"])
    'allowed: redis, zmq'
    """
    names = sorted(allowed)
    close = nearest(name, names)
    return f"allowed: {', '.join(names) or 'none'}" if close is None else f"did you mean {close!r}?"


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """The most similar name, ignoring case; None if no name is similar enough.

    Args:
        likeness: the least similarity that counts, from 0 to 1.
    """
    by_lower = {other.lower(): other for other in names}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[close[0]] if close else None


def similar_path(path: Path) -> str:
    """A question naming a file with a similar name beside a missing one; "" if there is none."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        if not path.exists():
            names = [file.name for file in islice(path.parent.iterdir(), MAX_LISTED)]
    close = nearest(path.name, names)
    return "" if close is None else f"; did you mean '{path.with_name(close)}'?"


@contextlib.contextmanager
def prefixed(setting: str) -> Iterator[None]:
    """Prefix the name in a ConfigError from the block with the setting above it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}.{error}") from error


@contextlib.contextmanager
def reading(path: Path, setting: str = "") -> Iterator[None]:
    """For a block that reads a file named by the user in this setting. Raises ConfigError if it
    cannot be read or is not text."""
    owner = f"{setting}: " if setting else ""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{owner}{path} is not UTF-8: {error}") from error
    except OSError as error:
        reason = f"{error.strerror or error}{similar_path(path)}"
        raise ConfigError(f"{owner}cannot read {path}: {reason}") from error


def read_text(path: Path, setting: str = "") -> str:
    """Of a file that a person has named, see `reading`."""
    with reading(path, setting):
        return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class ErrorRecord:
    """A failure in one line; `origin` is equal for failures of the same kind."""

    exit_code: int
    sentence: str
    origin: str

    @classmethod
    def of(cls, error: BaseException) -> "ErrorRecord":
        """The record of an error; the lines of a ConfigError are its several problems.

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
        """Decode JSON; None if it is not a record."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(**json.loads(data))
        return None


class ErrorPipe:
    """A pipe for one child's record: `environment` and `descriptor` are for the child, `read` for
    the parent."""

    def __init__(self) -> None:
        self._read_end, self.descriptor = os.pipe()
        os.set_blocking(self._read_end, False)

    @property
    def environment(self) -> Mapping[str, str]:
        file = f"/dev/fd/{self.descriptor}"
        return {ERROR_FILE_VARIABLE: file, PARENT_VARIABLE: str(os.getpid())}

    def read(self) -> ErrorRecord | None:
        """The record of the ended child; None if it left none."""
        with contextlib.suppress(BlockingIOError):
            return ErrorRecord.read(os.read(self._read_end, _MAX_BYTES))
        return None

    def __enter__(self) -> "ErrorPipe":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read_end)
        os.close(self.descriptor)


def leave_record(error: BaseException) -> bool:
    """Write the error's record if the parent expects one, and return whether it did. The file names
    of ranks with one parent contain $RANK."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is None or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        return False
    try:
        Path(os.path.expandvars(file)).write_text(json.dumps(asdict(ErrorRecord.of(error))))
    except OSError:
        return False
    return True


def read_record(file: Path) -> ErrorRecord | None:
    """The record of an ended process; None if it left none."""
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
    """Why a process ended: its own sentence, otherwise what its exit code says."""
    if record is not None:
        return record.sentence
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = ", as when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}{hint}"
