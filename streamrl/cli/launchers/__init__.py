"""Who starts the processes of a plan elsewhere; on this machine it is `streamrl.cli.launch`.

Invariant: a launcher is a line of LAUNCHERS, imported only when it is chosen. It is given the
configuration and the arguments of `streamrl launch`, makes the plan (`streamrl.placement`), starts
its commands as they stand (with `--dry-run` it prints what it would start), and returns the exit
code.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

from streamrl.config import RunConfig
from streamrl.extras import require

Launcher: TypeAlias = Callable[[RunConfig, argparse.Namespace], int]

JOB_VARIABLE = "SLURM_JOB_ID"
LAUNCHERS: Mapping[str, str] = {
    "ray": "streamrl.cli.launchers.ray.launch",
    "slurm": "streamrl.cli.launchers.slurm",
}
"""The module of each, by its option; its function is `launch`."""


def chosen(arguments: argparse.Namespace) -> str:
    """The name in LAUNCHERS that an option gives, "" for this machine."""
    return next((name for name in LAUNCHERS if getattr(arguments, name, None)), "")


def options_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those that chose it, such as ("--ray", ADDRESS), to be typed again."""
    name = chosen(arguments)
    given = getattr(arguments, name, None)
    address = (given,) if isinstance(given, str) and given != "auto" else ()
    return (f"--{name}", *address) if name else ()


def launcher(name: str) -> Launcher:
    """Raise ConfigError if its package is not installed."""
    if name == "ray":
        require("--ray:", "ray")
    found: Launcher = importlib.import_module(LAUNCHERS[name]).launch
    return found
