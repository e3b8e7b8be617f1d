"""Launchers, which start the processes of a plan elsewhere; `streamrl.cli.launch` starts them on
this machine.

Invariant: a launcher is an entry of LAUNCHERS, imported only when chosen. It gets the configuration
and the arguments of `streamrl launch`, makes the plan (`streamrl.placement`), starts its commands
unchanged (with `--dry-run` it prints what it would start), and returns the exit code.
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
"""The module of each launcher, by its option; it has a function `launch`."""


def chosen(arguments: argparse.Namespace) -> str:
    """The launcher's name in LAUNCHERS that an option chose; "" for this machine."""
    return next((name for name in LAUNCHERS if getattr(arguments, name, None)), "")


def options_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options that chose the launcher, such as ("--ray", ADDRESS), for a command to type
    again."""
    name = chosen(arguments)
    given = getattr(arguments, name, None)
    address = (given,) if isinstance(given, str) and given != "auto" else ()
    return (f"--{name}", *address) if name else ()


def launcher(name: str) -> Launcher:
    """The launcher of this name. Raises ConfigError if its package is not installed."""
    if name == "ray":
        require("--ray:", "ray")
    found: Launcher = importlib.import_module(LAUNCHERS[name]).launch
    return found
