"""`streamrl doctor [CONFIG]`: what is wrong with this machine, and how to mend it.

    0  no problem, maybe warnings
    1  a problem, or several
    2  the configuration cannot be read

A check is a function that yields findings, and a line in `_findings`. With a configuration, what
`streamrl check` looks at on the machine comes too. On several hosts it is run on each.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl.cli.doctor.accelerator import ask_torch, check_torch, driver_gpus
from streamrl.cli.doctor.findings import Finding, Level
from streamrl.cli.doctor.limits import CHECKS
from streamrl.cli.doctor.machine import read_machine
from streamrl.cli.doctor.packages import check_packages, needed_packages
from streamrl.cli.doctor.redis import ask_redis, check_redis
from streamrl.cli.doctor.sandbox import ask_sandbox, check_sandbox
from streamrl.cli.doctor.storage import check_disk, read_disk
from streamrl.cli.preflight.findings import Finding as CheckFinding
from streamrl.cli.preflight.findings import Kind
from streamrl.cli.preflight.machine import check_devices, check_folder
from streamrl.cli.preflight.machine import check_packages as check_extras
from streamrl.cli.preflight.network import check_addresses, check_servers
from streamrl.config import RunConfig
from streamrl.config.loading.arguments import configuration
from streamrl.config.run import RunSettings

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.PROBLEM: "red"}
_CHECKS: tuple[Callable[[RunConfig], Iterator[CheckFinding]], ...] = (
    check_extras,
    check_devices,
    check_folder,
    check_addresses,
    check_servers,
)
_LEVELS = {Kind.FACT: Level.OK, Kind.WARNING: Level.WARN, Kind.PROBLEM: Level.PROBLEM}


def main(arguments: argparse.Namespace) -> int:
    is_given = bool(arguments.file or arguments.config)
    config = configuration(arguments).config if is_given else None
    found = list(_findings(config))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        _print(found)
    return 1 if any(finding.level is Level.PROBLEM for finding in found) else 0


def _findings(config: RunConfig | None) -> Iterator[Finding]:
    machine = read_machine()
    for check in CHECKS:
        yield from check(machine)
    yield from check_packages(needed_packages())
    yield from check_torch(ask_torch(), driver_gpus())
    yield from check_sandbox(ask_sandbox())
    folder = RunSettings().folder if config is None else config.run.path
    has_journal = config is None or (config.buffer.has_daemon and config.buffer.journal)
    yield from check_disk(read_disk(Path(folder)), has_journal=has_journal)
    if config is not None:
        yield from _of_configuration(config)


def _of_configuration(config: RunConfig) -> Iterator[Finding]:
    for check in _CHECKS:
        for finding in check(config):
            setting = finding.sentence.partition(":")[0]
            yield Finding(_LEVELS[finding.kind], setting, finding.sentence)
    if config.buffer.url.startswith("redi"):
        yield from check_redis(ask_redis(config), config.buffer.url)


def _print(found: list[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for finding in found:
        console.print(f"{finding.level:<8}", style=_STYLES[finding.level], end="")
        console.print(finding.sentence, markup=False)
        if finding.remedy:
            console.print(f"        -> {finding.remedy}", markup=False)
    counts = {level: sum(finding.level is level for finding in found) for level in Level}
    console.print(f"{counts[Level.PROBLEM]} problems, {counts[Level.WARN]} warnings")
