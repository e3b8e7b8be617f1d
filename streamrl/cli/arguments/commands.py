"""Every command of `streamrl`: a new one is a line of commands.csv, a set of options in
`streamrl.cli.arguments.options`, and a module.

`buffer drain` and the like are verbs of `buffer`, of which its own help tells. A command or an
option that goes leaves a line in `GONE`. Invariant: an entry is a name, so the table imports no
command.
"""

import csv
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from streamrl.cli.arguments import options


@dataclass(frozen=True)
class Command:
    """`entry` is module:function; it is given the parsed arguments and returns the exit code. One
    that `imports_much` has its configuration in them as `run_config`, read before it is imported:
    so a mistake is said without the seconds that torch and transformers take."""

    entry: str
    summary: str
    add_options: Callable[[ArgumentParser], None]
    imports_much: bool = False


def _read() -> dict[str, dict[str, Command]]:
    """The commands by their groups."""
    groups: dict[str, dict[str, Command]] = {}
    text = (resources.files("streamrl.cli.arguments") / "commands.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        add_options = getattr(options, row["options"])
        command = Command(row["entry"], row["summary"], add_options, bool(row["imports_much"]))
        groups.setdefault(row["group"], {})[row["name"]] = command
    return groups


GROUPS = _read()
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
_VERBS = GROUPS.pop("verb")
GONE: Mapping[str, str] = {
    "--hosts": "`streamrl launch` has --ray; deploy/multi_node.sh starts a Ray cluster over ssh",
    "--nodes": "in a job `streamrl launch` has --slurm; sbatch submits deploy/slurm/run.sbatch",
    "--sbatch": "in a job `streamrl launch` has --slurm; sbatch submits deploy/slurm/run.sbatch",
    "--k8s": "`streamrl launch` has --ray; deploy/ray has what KubeRay makes a Ray cluster of",
    "doctor": "`streamrl check` says what is wrong with this machine, with CONFIG also with a run",
    "top": "`streamrl status RUN --follow` is the live screen",
    "watch": "`streamrl status RUN --follow --lines` prints the progress as lines",
    "healthy": "`streamrl status RUN --probe ROLE` is the probe of one daemon",
    "make-model": "it is `streamrl get-model --config CONFIG`; a launch makes the model by itself",
    "books": "it is `streamrl buffer books`",
    "score": "it is `streamrl parity --model PATH --score FILE --out FILE`",
    "parity sample": "it is `streamrl parity CONFIG --sample FILE`",
    "parity score": "it is `streamrl parity CONFIG --score FILE --out FILE`",
    "chaos": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.chaos`",
    "soak": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.soak`",
    "ablate": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.ablate`",
}
"""Commands and options of earlier releases, and where each is now."""


def verbs_of(name: str) -> Mapping[str, Command]:
    """By the second word, the commands of two words that begin with this one."""
    found = (verb.partition(" ") for verb in _VERBS)
    return {verb: _VERBS[f"{first} {verb}"] for first, _, verb in found if first == name}
