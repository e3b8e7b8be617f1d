"""Commands of `streamrl` in processes of their own: what they import is freed when they end."""

import shutil
import subprocess
import sys
from pathlib import Path

from streamrl.errors import EXIT_CONFIG, ConfigError, StreamRLError


def call(*arguments: str) -> str:
    """Run `streamrl` with these arguments to its end; its standard output.

    Waits as long as the command runs; its messages go to standard error.

    Raises:
        ConfigError: it ended with exit code 2.
        StreamRLError: it failed otherwise.
    """
    completed = subprocess.run(
        [executable(), *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if completed.returncode != 0:
        kind = ConfigError if completed.returncode == EXIT_CONFIG else StreamRLError
        raise kind(f"streamrl {arguments[0]} ended with exit code {completed.returncode}")
    return completed.stdout


def executable() -> str:
    """The `streamrl` command of this Python."""
    beside = Path(sys.executable).with_name("streamrl")
    path = str(beside) if beside.exists() else shutil.which("streamrl")
    if path is None:
        raise StreamRLError("the command `streamrl` is not installed for this Python")
    return path
