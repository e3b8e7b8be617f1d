"""Whether this machine can keep apart the programs of a model's that the run would start."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from actors.sandbox.isolation import Isolation, IsolationChoice, choose, why_not
from streamrl.cli.preflight.findings import Finding, fact, problem, warning
from streamrl.config import RunConfig
from streamrl.errors import ConfigError

_HELD = {
    "namespaces": "programs have namespaces of their own",
    "landlock": "programs are held by Landlock and a filter of system calls; they can start no "
    "processes, and what they write to their folder is not bounded together",
    "none": "isolation is none: programs that a model wrote run with the files, processes and "
    "network of this user in reach",
}


def check_sandbox(config: RunConfig) -> Iterator[Finding]:
    """Runs one or two programs where the run has the reward `code` or the tool `python`."""
    known: tuple[IsolationChoice, ...] = get_args(IsolationChoice)
    for place, kwargs in _users(config):
        # What it was if it is none of them is said where the arguments are checked.
        for wanted in (name for name in known if name == kwargs.get("isolation", "auto")):
            try:
                yield _said(place, wanted, choose(wanted))
            except ConfigError as error:
                yield problem(f"{place}: {error}")


def _said(place: str, wanted: IsolationChoice, isolation: Isolation) -> Finding:
    sentence = f"{place}: {_HELD[isolation]}"
    if isolation == "none":
        return warning(sentence)
    if isolation == "landlock" and wanted == "auto":
        return warning(f"{sentence} (no namespaces: {why_not('namespaces')})")
    return fact(sentence)


def _users(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings that start programs, each with its arguments."""
    for entry in config.entries:
        alone = f"{entry.place}reward" if entry.place else "data.reward"
        name = f"{entry.place}data.rewards" if entry.data.rewards else alone
        for reward in entry.data.all_rewards:
            if reward.reward == "code":
                yield f"{name}: code", reward.kwargs
    for tool in config.generator.tools:
        if tool.tool == "python":
            yield "generator.tools: python", tool.kwargs
