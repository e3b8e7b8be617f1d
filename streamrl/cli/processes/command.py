"""Commands of `streamrl` in processes of their own: what they import is freed when they end."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from streamrl.cli.arguments.commands import COMMANDS
from streamrl.cli.processes.restarts import sentence_of
from streamrl.error_record import ErrorPipe
from streamrl.errors import Interrupted, StreamRLError, error_of

GRACE_PERIOD_S = 10.0


def call(*arguments: str, within_s: float | None = None) -> str:
    """Run `streamrl` with these arguments to its end; its standard output.

    Waits as long as the command runs, which is killed after `within_s`; its messages go to standard
    error. A signal that ends this process ends the command, too.

    Raises:
        StreamRLError: it failed; of the failure's kind, with the command's own sentence.
    """
    with _sigterm_raises(), ErrorPipe() as pipe:
        with subprocess.Popen(
            [executable(), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **pipe.environment},
            pass_fds=(pipe.descriptor,),
        ) as process:
            try:
                output, _ = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                output, _ = process.communicate()
            except KeyboardInterrupt:
                _end(process)
                raise
        if process.returncode != 0:
            code, two = process.returncode, " ".join(arguments[:2])
            name = two if two in COMMANDS else arguments[0]
            raise error_of(code, f"{name}: {sentence_of(code, pipe.read())}")
    return output


def executable() -> str:
    """The `streamrl` command of this Python."""
    beside = Path(sys.executable).with_name("streamrl")
    path = str(beside) if beside.exists() else shutil.which("streamrl")
    if path is None:
        raise StreamRLError("the command `streamrl` is not installed for this Python")
    return path


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process and those that it started. Waits GRACE_PERIOD_S, then kills them; a second
    signal kills them at once."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(GRACE_PERIOD_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _signal(process, signal.SIGKILL)


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number))
