"""How a daemon runs: one event loop, two signals (`streamrl.shutdown`), and an exit code for its
supervisor: 0 if the work is done or was drained after a first signal, otherwise that of its error
(see `streamrl.errors`).

Invariant: a failing task ends the daemon, and its supervisor gets the reason in one sentence. A
daemon's `main` calls `run` with a coroutine, which also waits for `Shutdown.requested`.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from streamrl.config import RunConfig, to_yaml
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.durable_files import write_file
from streamrl.errors import (
    EXIT_CRASHED,
    PARENT_VARIABLE,
    ConfigError,
    DivergedError,
    FencedError,
    RolloutError,
    StreamRLError,
    TransportError,
    exit_code_of,
    leave_record,
)
from streamrl.log_lines import JsonFormatter, log_as_json
from streamrl.shutdown import Shutdown, Stopped
from streamrl.user_code import user_traceback

# For mallopt(3): the parameters' numbers are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Part of `run.stop_s` left to the launcher, which ends the buffer after the other processes.
FORCED_S = 8.0
_IS_EXPECTED = "is_expected"
_PROC = Path("/proc")

log = logging.getLogger(__name__)


def run(main: Callable[[Shutdown], Awaitable[None]], *, role: str, config: RunConfig) -> int:
    """Run the daemon to its end and return its exit code."""
    try:
        config.run.path.mkdir(parents=True, exist_ok=True)
        if not (config.run.path / RESOLVED_FILE).exists():
            write_file(config.run.path / RESOLVED_FILE, to_yaml(config))
        _start_logging(role, config)
    except OSError as error:
        sys.stderr.write(f"{role}: cannot write the run's folder {config.run.path}: {error}\n")
        return EXIT_CRASHED

    shutdown = Shutdown(force_s(config))

    async def supervised() -> int:
        shutdown.install()
        watching = asyncio.create_task(_watch_parent(shutdown))
        code = 0
        try:
            await main(shutdown)
        except Stopped:
            log.info("stopped at the start: nothing is lost")
        except BaseException as error:
            code = _report(error)
        if code == 0:
            log.info("%s: done", role)
        watching.cancel()
        # Do not wait for threads that never return.
        shutdown.conclude(code)
        return code

    keep_freed_memory()
    try:
        return asyncio.run(supervised())
    except BaseException as error:
        return _report(error)
    finally:
        shutdown.uninstall()


def force_s(config: RunConfig) -> float:
    """Seconds after a first signal at which a daemon is killed: FORCED_S before `stop_within_s`."""
    return config.stop_within_s - FORCED_S


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    return PARENT_VARIABLE in os.environ


def launcher_has_ended() -> bool:
    """Whether the launcher that started this process is gone."""
    parent = os.environ.get(PARENT_VARIABLE)
    return parent is not None and os.getppid() != int(parent)


def has_siblings() -> bool:
    """Whether another process of the same launcher still runs."""
    parent = os.environ.get(PARENT_VARIABLE)
    return parent is not None and bool(processes_with(PARENT_VARIABLE, parent.__eq__))


def processes_with(variable: str, is_wanted: Callable[[str], bool]) -> list[int]:
    """The ids of this user's other processes whose environment has a wanted value of the variable.
    Empty on systems without /proc."""
    others = {int(path.name) for path in _PROC.glob("[0-9]*")} - {os.getpid()}
    return [pid for pid in others if (v := _value(pid, variable)) and is_wanted(v)]


def _value(pid: int, variable: str) -> str:
    """The process's value of the variable; "" if it has none, belongs to another user, or has
    ended."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{variable}=".encode()
    return next((os.fsdecode(v[len(prefix) :]) for v in variables if v.startswith(prefix)), "")


@contextmanager
def binding(setting: str, address: str) -> Iterator[None]:
    """For a block that binds a socket to the setting's address.

    Raises:
        TransportError: another process uses the address; it may be free later.
        ConfigError: this machine has no such address.
    """
    try:
        yield
    except zmq.ZMQError as error:
        sentence = f"{setting}: cannot listen at {address}: {error}"
        if error.errno != zmq.EADDRINUSE:
            raise ConfigError(sentence) from error
        raise TransportError(f"{sentence}; is another run using it?") from error


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of payloads and tensors instead of returning it to the kernel:
    page faults took half of the transfer time of a 1 MB group. No effect without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def keep_settings(config: RunConfig) -> None:
    """Write the learner's settings to the run folder, unless a launch has already done so."""
    if not is_launched():
        # `--resume` applies to this start, not to the next.
        kept = config.with_values(run={"resume": "never"})
        write_file(config.run.path / RESOLVED_FILE, to_yaml(kept))


async def _watch_parent(shutdown: Shutdown) -> None:
    """Drain when the launcher has ended. Polls the parent's process id, since no signal reports its
    end."""
    while is_launched() and not shutdown.requested.is_set():
        if launcher_has_ended():
            shutdown.ask("the launcher has ended")
        await asyncio.sleep(1.0)


def _report(error: BaseException) -> int:
    """Log why the daemon ends, leave it for the supervisor, and return the exit code."""
    reason = _reason(error)
    leave_record(reason)
    if isinstance(reason, StreamRLError | ImportError):
        log.error("%s", reason, **user_code_details(reason))
    else:
        log.critical("crashed: %s", reason, exc_info=error)
    return exit_code_of(reason)


def user_code_details(error: BaseException) -> Mapping[str, Any]:
    """Arguments of a logging call: the traceback of the user's code, for the log file only."""
    cause = error.__cause__
    traceback = user_traceback(cause)
    if cause is None or traceback is None:
        return {}
    return {"exc_info": (type(cause), cause, traceback), "extra": {_IS_EXPECTED: True}}


def _reason(error: BaseException) -> BaseException:
    """The most telling error of a group: one that a restart cannot change, or a crash."""
    causes = list(_leaves(error))
    for family in (FencedError, ConfigError, ImportError, RolloutError, DivergedError):
        for cause in causes:
            if isinstance(cause, family):
                return cause
    return next((cause for cause in causes if not isinstance(cause, StreamRLError)), causes[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _start_logging(role: str, config: RunConfig) -> None:
    """Log to standard error, and to logs/ROLE.log unless standard error already goes there."""
    log_file = config.run.path / "logs" / f"{role}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    is_file = _is_standard_error(log_file)
    if config.run.log_format == "json":
        formatter: logging.Formatter = JsonFormatter(role)
        handlers: list[logging.Handler] = [logging.StreamHandler(log_as_json(role))]
    else:
        formatter = logging.Formatter(f"%(asctime)s {role} %(levelname).1s %(name)s: %(message)s")
        handlers = [logging.StreamHandler(sys.stderr)]
    handlers[0].setFormatter(formatter if is_file else _TerminalFormatter(formatter))
    if not is_file:
        handlers.append(logging.FileHandler(log_file))
        handlers[1].setFormatter(formatter)
    logging.basicConfig(level=config.run.log_level.upper(), handlers=handlers, force=True)
    if config.run.log_level == "info":
        # It logs a line per request.
        logging.getLogger("httpx2").setLevel(logging.WARNING)


class _TerminalFormatter(logging.Formatter):
    """Omits the traceback of expected errors."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, _IS_EXPECTED, False):
            record = logging.makeLogRecord({**vars(record), "exc_info": None})
        return self._formatter.format(record)


def _is_standard_error(path: Path) -> bool:
    try:
        return path.exists() and os.path.samestat(path.stat(), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False
