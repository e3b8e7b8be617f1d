"""A server process of one engine: started by it, and gone with it (see `process_guard`)."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.errors import TransportError
from streamrl.run_folder import last_log_line

_GRACE_S = 15.0
# As a file, so that it imports nothing and watches from the first moment on.
_GUARD = Path(__file__).with_name("process_guard.py")


class ServerProcess:
    """A running command; what it says goes to `log_file`."""

    def __init__(
        self, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = log_file
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def require_alive(self) -> None:
        """
        Raises:
            TransportError: it has ended; with its last words.
        """
        code = self._process.poll()
        if code is not None:
            raise TransportError(
                f"the inference server ended with {code}: {last_log_line(self._log_file)} "
                f"(see {self._log_file})"
            )

    def close(self) -> None:
        """End it. Waits until it has, at most as long as its guard gives it."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
