"""Who starts the processes of a plan elsewhere; on this machine it is `streamrl.cli.launch`.

Invariant: a launcher is a line of LAUNCHERS, imported only when it is chosen. It is given the
configuration and the arguments of `streamrl launch`, makes the plan (`streamrl.placement`), starts
its commands as they stand (with `--dry-run` it prints what it would start), and returns the exit
code.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from streamrl.config import RunConfig
from streamrl.errors import ConfigError

Launcher: TypeAlias = Callable[[RunConfig, argparse.Namespace], int]

JOB_VARIABLE = "SLURM_JOB_ID"
_OPTIONS = (
    ("nodes", "slurm", "--slurm"),
    ("sbatch", "slurm", "--slurm"),
    ("image", "kubernetes", "--k8s"),
    ("namespace", "kubernetes", "--k8s"),
    ("gpus_per_node", "kubernetes", "--k8s"),
    ("storage", "kubernetes", "--k8s"),
)

LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {
        "ssh": "streamrl.cli.launchers.ssh.launch:launch",
        "ray": "streamrl.cli.launchers.ray.launch:launch",
        "slurm": "streamrl.cli.launchers.slurm.launch:launch",
        "kubernetes": "streamrl.cli.launchers.kubernetes.launch:launch",
    }
)


def chosen(config: RunConfig | None, arguments: argparse.Namespace) -> str:
    """The name in LAUNCHERS, "" for this machine: that of an option, else ssh where
    `cluster.hosts` names machines."""
    given = [name for name in LAUNCHERS if getattr(arguments, name, None)]
    return given[0] if given else "ssh" if config and config.cluster.hosts else ""


def require_launcher(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: an option is for a launcher that is not asked for: without it the run would be
            started here.
    """
    for option, name, flag in _OPTIONS:
        if getattr(arguments, option) not in (None, []) and not getattr(arguments, name):
            raise ConfigError(
                f"--{option.replace('_', '-')}: is an option of {flag}, which was not given"
            )


def starts_here(name: str) -> bool:
    """Whether what `streamrl check` sees from here is what the processes will have: on this
    machine, and within a job of Slurm."""
    return not name or (name == "slurm" and JOB_VARIABLE in os.environ)


def launcher(name: str) -> Launcher:
    """What LAUNCHERS names."""
    module, _, function = LAUNCHERS[name].partition(":")
    found: Launcher = getattr(importlib.import_module(module), function)
    return found
