"""The processes that vLLM starts for an engine in this process: why they ended.

vLLM's own exceptions only name a stack trace printed elsewhere. So vLLM's processes also write
their errors to a file (`actors.engines.vllm.plugin`), whose last line goes into our error. A
process killed by a signal writes nothing; its exit code names the signal.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from actors.engines.served.process import death
from actors.engines.vllm.plugin import ERROR_LOG_VARIABLE
from streamrl.errors import TransportError

_END_S = 2.0


class VllmProcesses:
    """`folder` gets the file of errors, which is empty as long as there are none."""

    def __init__(self, folder: Path) -> None:
        self._log_file = folder.absolute() / f"vllm-{os.getpid()}.log"
        self._processes: tuple[BaseProcess, ...] = ()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the call that starts vLLM's processes.

        Raises:
            TransportError: vLLM did not start, with the last line of its errors.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file.write_text("")
        os.environ[ERROR_LOG_VARIABLE] = str(self._log_file)
        before = multiprocessing.active_children()
        try:
            yield
        except Exception as error:
            raise TransportError(f"{error}; {self.death()}") from error
        self._processes = tuple(p for p in multiprocessing.active_children() if p not in before)

    def death(self) -> TransportError:
        """The error for vLLM's end. Waits for the end of its processes, `_END_S` at most."""
        for process in self._processes:
            process.join(_END_S)
        return death("vLLM", _exit_code(self._processes), self._log_file)


def _exit_code(processes: tuple[BaseProcess, ...]) -> int | None:
    """That of the process which failed first, as far as it can be known: vLLM ends the others by
    SIGTERM or SIGKILL."""
    codes = [process.exitcode for process in processes if process.exitcode]
    is_own = [code for code in codes if code not in (-signal.SIGTERM, -signal.SIGKILL)]
    return next(iter([*is_own, *codes]), None)
