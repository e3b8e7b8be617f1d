"""A run that was started from Python: followed, waited for, stopped.

A thread reads what the launch prints. Invariant: the launch ends with this process, since it cannot
print any more, and its daemons end with it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.checkpoints.find import newest
from streamrl.cli.processes.command import executable
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.error_record import ErrorPipe, sentence_of
from streamrl.errors import error_of
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import METRICS_FILE, read_metrics

_POLL_S = 0.2
_KEPT_LINES = 200


class Run:
    """Made by `streamrl.train`."""

    def __init__(
        self,
        config: RunConfig,
        process: "subprocess.Popen[str]",
        pipe: ErrorPipe,
        *,
        show: bool,
        replaced: int | None = None,
    ) -> None:
        """`replaced` is the `_stamp` of the run that the launch moves aside."""
        self.config = config
        self._process = process
        self._pipe = pipe
        self._failure: str | None = None
        self._replaced = replaced
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, args=(show,), daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, config: RunConfig, arguments: Sequence[str], file: Path, *, show: bool) -> "Run":
        """`streamrl launch FILE` with these arguments."""
        pipe = ErrorPipe()
        replaced = _stamp(config.run.path) if "--new" in arguments else None
        process = subprocess.Popen(
            [executable(), "launch", str(file), "--no-view", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **pipe.environment},
            pass_fds=(pipe.descriptor,),
        )
        return cls(config, process, pipe, show=show, replaced=replaced)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.config.run.path

    @property
    def exit_code(self) -> int | None:
        """Of the launch; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The last lines that the launch printed."""
        return "".join(self._lines)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete one."""
        found = newest(self.path).checkpoint if self._has_begun else None
        return None if found is None else found.path

    @property
    def evaluation(self) -> dict[str, Any]:
        """What `run.evaluate` has found; {} before that."""
        return read_json(self.path / "evaluation.json") if self._has_begun else {}

    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step so far, by the names of `metrics.jsonl`; `pandas.DataFrame` takes
        it."""
        return read_metrics(self.path / METRICS_FILE) if self._has_begun else []

    def follow(self) -> Iterator[dict[str, Any]]:
        """Each step's row as it comes. Waits for the next one; the run's end unblocks."""
        last = -1
        while True:
            is_over = self.exit_code is not None
            for row in self.metrics():
                if row.get("step", -1) > last:
                    last = row["step"]
                    yield row
            if is_over:
                return
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Waits for the run's end; an interrupt stops the run, and is raised again.

        Raises:
            StreamRLError: the run failed; of the failure's kind, with its sentence.
            TimeoutError: it has not ended after `timeout_s`.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.path} has not ended after {timeout_s:g} s") from error
        except KeyboardInterrupt:
            self.stop()
            raise
        self._reader.join()
        # The latter before the launch has begun to listen to signals.
        if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise error_of(code, self._sentence(code))
        return self

    def stop(self, timeout_s: float | None = None) -> "Run":
        """Stop the run, which saves a checkpoint first; `train(..., resume=True)` goes on with it.
        Waits for its end."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def __repr__(self) -> str:
        state = "runs" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"<Run {self.path}: {state}>"

    @property
    def _has_begun(self) -> bool:
        """Whether the folder is this run's, and no longer that of the one which it replaces."""
        return self._replaced is None or _stamp(self.path) != self._replaced

    def _sentence(self, code: int) -> str:
        if self._failure is None:
            self._failure = f"launch: {sentence_of(code, self._pipe.read())}"
        return self._failure

    def _read_output(self, show: bool) -> None:
        """Until the launch has closed it; waits for the next line."""
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.append(line)
            if show:
                sys.stdout.write(line)


def _stamp(folder: Path) -> int | None:
    """Of the run in the folder: a launch writes its configuration anew. None without a run."""
    try:
        return (folder / RESOLVED_FILE).stat().st_mtime_ns
    except OSError:
        return None
