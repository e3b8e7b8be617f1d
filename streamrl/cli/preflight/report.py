"""All that can be known of a configuration without starting anything, in one list.

A new check is a function that yields findings, and a line in `CHECKS`. It imports no torch.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from streamrl.cli.preflight.data import check_prompts, check_tools, check_user_code
from streamrl.cli.preflight.findings import Finding, Kind, problem
from streamrl.cli.preflight.limits import check_effects, check_limits, check_sizes
from streamrl.cli.preflight.machine import (
    check_devices,
    check_folder,
    check_packages,
    check_sandbox,
    check_versions,
)
from streamrl.cli.preflight.model import check_model
from streamrl.cli.preflight.network import check_addresses, check_secrets, check_servers
from streamrl.config import LoadedConfig, RunConfig
from streamrl.errors import ConfigError

CHECKS: Mapping[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "model": check_model,
    "prompts": check_prompts,
    "effects": check_effects,
    "reward, environment, algorithm": check_user_code,
    "tools": check_tools,
    "sandbox": check_sandbox,
    "versions": check_versions,
    "packages": check_packages,
    "devices": check_devices,
    "run folder": check_folder,
    "addresses": check_addresses,
    "servers": check_servers,
    "sizes": check_sizes,
    "limits": check_limits,
}


@dataclass(frozen=True)
class CheckReport:
    """Sentences, in the order in which they were found."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: tuple[str, ...]


def examine(loaded: LoadedConfig, refused: ConfigError | None = None) -> CheckReport:
    """What every check finds; `refused` is what the configuration itself was refused for.

    Runs the user's files, whose output goes to standard error.
    """
    with contextlib.redirect_stdout(sys.stderr):
        found = [finding.located(loaded.origins) for finding in _findings(loaded)]

    def sentences(kind: Kind) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.sentence for f in found if f.kind is kind))

    refusals = () if refused is None else tuple(str(refused).splitlines())
    problems = (*refusals, *sentences(Kind.PROBLEM))
    return CheckReport(problems, sentences(Kind.WARNING), sentences(Kind.FACT))


def _findings(loaded: LoadedConfig) -> Iterator[Finding]:
    for check in CHECKS.values():
        try:
            yield from check(loaded.config)
        except ConfigError as error:
            yield problem(str(error))
    yield from check_secrets(loaded.config, loaded.origins.get("buffer.url"))
