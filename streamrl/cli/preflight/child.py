"""`streamrl check` before a launch, in a process of its own: what the user's files import is freed
when it ends, and what they do to their process is not done to the launcher's."""

import argparse
import subprocess
import sys

from streamrl.cli.processes.command import executable
from streamrl.config.arguments import config_file
from streamrl.errors import EXIT_CONFIG, ConfigError, StreamRLError


def require_startable(arguments: argparse.Namespace) -> None:
    """Print the warnings of a check. Waits for its end.

    Raises:
        ConfigError: the run cannot start; one line for each problem.
        StreamRLError: the check itself failed.
    """
    settings = [word for text in arguments.overrides for word in ("--set", text)]
    command = [executable(), "check", "--quiet", config_file(arguments), *settings]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    before, found, problems = done.stderr.partition("streamrl check: ")
    print(before, end="", file=sys.stderr)
    if done.returncode == EXIT_CONFIG:
        raise ConfigError((problems if found else before).rstrip())
    if done.returncode != 0:
        raise StreamRLError(f"the check ended with exit code {done.returncode}: {problems}")
