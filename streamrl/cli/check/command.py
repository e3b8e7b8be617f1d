"""`streamrl check [CONFIG]`: what is wrong with this machine, and whether a run can start on it.

    0  no problem, maybe warnings
    1  the machine has a problem
    2  the run cannot start, or the configuration cannot be read

Without a configuration it checks only the machine, with one it checks everything. A check is a
function that yields findings, listed in `_OF_RUN` or `machine_findings`. Checks start nothing of
the run and do not import torch here; `--deep` samples one group with the model.

Invariant: what keeps a run from starting goes to standard error, in the words with which `streamrl
launch` would refuse it; everything else goes to standard output, which is valid YAML if it shows
the configuration.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from actors.sandbox.isolation import KINDS
from actors.sandbox.sandbox import why_not
from streamrl.cli.check import (
    data,
    machine,
    model,
    network,
    packages,
    settings,
    unused_settings,
)
from streamrl.config import LoadedConfig, RunConfig, render
from streamrl.config.loading.load import (
    config_file,
    contradictions_beside,
    is_of_a_stand_in,
    load_usable,
)
from streamrl.config.run import RunSettings
from streamrl.errors import EXIT_CONFIG, EXIT_CRASHED, ConfigError
from streamrl.findings import CONFIGURATION, Area, Finding, Severity
from streamrl.placement.hosts import driver_devices, is_rocm
from streamrl.run_folder import held_run

_OF_RUN: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    model.check_model,
    data.check_data,
    settings.check_engine_device,
    unused_settings.check_unused_settings,
    data.check_user_code,
    data.check_sandbox,
    packages.check_extras,
    settings.check_devices,
    settings.check_folder,
    network.check_addresses,
    network.check_servers,
    settings.check_sizes,
)
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red"}


def main(arguments: argparse.Namespace) -> int:
    if not any((arguments.file, arguments.config, arguments.overrides, arguments.deep)):
        # No option concerns a run.
        found = list(machine_findings(RunSettings().folder))
        _print(found, is_brief=arguments.quiet, is_json=arguments.json)
        return _exit_code(found)
    loaded, refused = load_usable(config_file(arguments), arguments.overrides)
    config = loaded.config
    has_journal = config.buffer.binds_url and config.buffer.journal
    of_run = run_findings(loaded, refused)
    of_run += map(CONFIGURATION.warning, filter(None, [held_run(config.run.path)]))
    if not arguments.json and (problems := refusals(of_run)):
        # Refuse at once; the machine is checked, which takes seconds for torch, only if the run can
        # start.
        _print([finding for finding in of_run if not _refuses(finding)], is_brief=True)
        raise ConfigError("\n".join(problems))
    of_machine = machine_findings(config.run.path, has_journal=has_journal)
    found = [*of_machine, *of_run]
    if arguments.json or arguments.quiet or arguments.deep:
        _print(found, is_brief=True, is_json=arguments.json)
    else:
        print(render(loaded, with_defaults=arguments.all))
        _print(found, is_brief=not arguments.all, prefix="# ")
    if arguments.deep:
        from streamrl.cli.check.deep import sample_one_group

        return sample_one_group(config)
    return _exit_code(found)


def machine_findings(folder: Path | str, *, has_journal: bool = True) -> Iterator[Finding]:
    """Findings about this machine. `folder` is the run's, `has_journal` whether its buffer keeps a
    journal there. Waits for a process that imports torch, and for two programs."""
    yield from machine.check_machine(machine.read_machine())
    yield from packages.check_packages(packages.needed_packages())
    # The driver does not count the GPUs of ROCm.
    num_gpus = None if is_rocm() else len(driver_devices())
    yield from packages.check_torch(packages.ask_torch(), num_gpus)
    yield from machine.check_isolation({kind: why_not(kind) for kind in KINDS})
    yield from machine.check_disk(machine.read_disk(Path(folder)), has_journal=has_journal)


def machine_problems(folder: Path) -> Iterator[Finding]:
    """Problems of the machine that are found quickly: packages outside their range, and a full
    disk."""
    core = [package for package in packages.needed_packages() if not package.extra]
    found = (*packages.check_packages(core), *machine.check_disk(machine.read_disk(folder)))
    return (finding for finding in found if finding.severity is Severity.PROBLEM)


def run_findings(loaded: LoadedConfig, refused: ConfigError | None = None) -> list[Finding]:
    """Findings about the run; `refused` is the error that refused its configuration. Each finding
    appears once, with the place of its setting.

    Runs the user's files, whose output goes to standard error.
    """
    lines: list[str] = []
    if refused is not None:
        lines = [*str(refused).splitlines(), *contradictions_beside(loaded, refused)]
    found: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr):
        for check in _OF_RUN:
            found += CONFIGURATION.up_to_refusal(check(loaded.config))
        found += network.check_secrets(loaded.config, loaded.origins.get("buffer.url"))
        found += settings.check_resume(loaded.config, loaded.origins.get("run.resume", ""))
    said = {finding.sentence for finding in found}
    all_found = [CONFIGURATION.problem(line) for line in lines if line not in said]
    for finding in found:
        is_said = finding.sentence in lines
        if refused and not is_said and is_of_a_stand_in(finding.sentence, refused, loaded.origins):
            continue
        if finding.severity is not Severity.OK:
            where = loaded.origins.get(finding.cause, "")
            finding = msgspec.structs.replace(finding, where=where)
        all_found.append(finding)
    return list(dict.fromkeys(all_found))


def refusals(found: Sequence[Finding]) -> list[str]:
    """The sentences that say what keeps the run from starting."""
    return [str(finding) for finding in found if _refuses(finding)]


def _refuses(finding: Finding) -> bool:
    return finding.severity is Severity.PROBLEM and finding.area is not Area.MACHINE


def _exit_code(found: Sequence[Finding]) -> int:
    if any(map(_refuses, found)):
        return EXIT_CONFIG
    is_broken = any(finding.severity is Severity.PROBLEM for finding in found)
    return EXIT_CRASHED if is_broken else 0


def _print(
    found: Sequence[Finding], *, is_brief: bool, is_json: bool = False, prefix: str = ""
) -> None:
    """Print findings by area; `is_brief` leaves out what is in order. The prefix turns all lines
    into comments; the last line has the counts."""
    if is_json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    shown = [f for f in found if not (is_brief and f.severity is Severity.OK)]
    console = Console(soft_wrap=True, highlight=False)
    with console.capture() as captured:
        for area in Area:
            for line in _lines(area, [finding for finding in shown if finding.area is area]):
                console.print(Text(prefix).append_text(line))
        if prefix or not is_brief:
            console.print(f"{prefix}{_counted(found)}")
    # Not printed by the console itself, which would hide that the reader of a pipe has gone.
    print(captured.get(), end="")


def _lines(area: Area, found: Sequence[Finding]) -> Iterator[Text]:
    if found:
        yield Text(area)
    for finding in found:
        severity = (f"  {finding.severity:<8} ", _STYLES[finding.severity])
        yield Text.assemble(severity, str(finding))
        if finding.remedy:
            yield Text(f"           -> {finding.remedy}")


def _counted(found: Sequence[Finding]) -> str:
    """The counts, and the areas that were checked, since areas without findings are not shown.

    >>> _counted([Area.DATA.warning("a"), Area.MACHINE.ok("b")])
    '0 problems, 1 warning; looked at: machine, data'
    """
    names = [str(finding.severity) for finding in found]
    counts = {name: names.count(name) for name in (Severity.PROBLEM, Severity.WARNING)}
    counted = ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items())
    areas = {finding.area for finding in found}
    return f"{counted}; looked at: {', '.join(area for area in Area if area in areas)}"
