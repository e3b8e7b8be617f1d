"""A server process that its engine starts; it ends with the engine (see `process_guard`)."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.errors import TransportError
from streamrl.run_folder import last_log_line

_GRACE_S = 4.5
# Run as a file, so that it imports nothing and watches its owner from the start.
GUARD = Path(__file__).with_name("process_guard.py")


class ServerProcess:
    """A running command whose output goes to `log_file`."""

    def __init__(
        self, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = log_file
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def require_alive(self) -> None:
        """
        Raises:
            TransportError: the process has ended; with the last line of its log.
        """
        code = self._process.poll()
        if code is not None:
            raise death("the inference server", code, self._log_file)

    def close(self) -> None:
        """End the process. Waits until it has ended, at most as long as its guard allows."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)


def death(name: str, exit_code: int | None, log_file: Path) -> TransportError:
    """The error for a process that has ended, with the last line of its log.

    >>> str(death("vLLM", -4, Path("nowhere")))
    'vLLM ended with SIGILL: cannot read nowhere: No such file or directory (see nowhere)'
    """
    match exit_code:
        case None:
            ended = "ended"
        case int() if exit_code < 0:
            ended = f"ended with {signal.Signals(-exit_code).name}"
        case _:
            ended = f"ended with {exit_code}"
    return TransportError(f"{name} {ended}: {last_log_line(log_file)} (see {log_file})")


_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_gpu() -> bool:
    """Whether a server on this machine may run on a GPU, regardless of the torch installed here."""
    return any(path.exists() for path in _GPU_DEVICES)
