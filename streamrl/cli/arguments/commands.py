"""Every command of `streamrl`. A new one is a line of commands.csv, sets of options in
`streamrl.cli.arguments.options`, and a module.

`buffer drain` and the like are verbs of `buffer`, which its own help lists. A removed command or
option leaves a line in `GONE`. Invariant: an entry is a name, so the table imports no command.

`parse` reads a command line; the help shows the commands by group.
"""

import argparse
import csv
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from streamrl import __version__
from streamrl.cli.arguments import options
from streamrl.errors import did_you_mean


@dataclass(frozen=True)
class Command:
    """`entry` is module:function, which may be a coroutine function; it takes the parsed arguments
    and returns the exit code. If it `imports_much`, the configuration is read before the import and
    passed in the arguments as `run_config`, so a mistake is reported without the seconds that
    importing torch and transformers takes."""

    entry: str
    summary: str
    option_sets: Sequence[Callable[[ArgumentParser], None]]
    imports_much: bool = False


def _read() -> dict[str, dict[str, Command]]:
    groups: dict[str, dict[str, Command]] = {}
    text = (resources.files("streamrl.cli.arguments") / "commands.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        sets = [getattr(options, name) for name in row["options"].split()]
        command = Command(row["entry"], row["summary"], sets, bool(row["imports_much"]))
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
    "--num-prompts": "`streamrl parity` has --set parity.num_prompts=N",
    "--max-mean-gap": "`streamrl parity` has --set parity.max_mean_gap=NATS",
    "--max-gap": "`streamrl parity` has --set parity.max_gap=NATS",
    "chaos": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.chaos`",
    "soak": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.soak`",
    "ablate": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.ablate`",
}
"""Commands and options of earlier releases, and what replaces each."""


def verbs_of(name: str) -> Mapping[str, Command]:
    """The two-word commands that begin with this word, by their second word."""
    found = (verb.partition(" ") for verb in _VERBS)
    return {verb: _VERBS[f"{first} {verb}"] for first, _, verb in found if first == name}


# A setting as other systems write it: `key=value`, `+key=value`, `--key=value`, `--key value`.
_SETTING = re.compile(r"--([a-z_]+\.[\w.]+)|[+~-]*([a-z_]+\.[\w.]+)=(.*)", re.DOTALL)
_WIDTH = max(len(name) for commands in GROUPS.values() for name in commands) + 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the chosen command; `command` is its name, `entry` and `imports_much`
    are as in `Command`.

    Raises:
        SystemExit: the usage is wrong (exit code 2), or help or the version was printed (0).
    """
    parser, parsers = _parser()
    words = _joined(arguments)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    for word in (*words[:1], *options):
        if word in GONE:
            parser.error(f"{word} has gone: {GONE[word]}")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"no command {words[0]!r}: {did_you_mean(words[0], COMMANDS)}")
    parsed, extra = parser.parse_known_args(words)
    if extra:
        own = parsers[parsed.command]
        known = re.findall(r"--[\w-]+", own.format_usage())
        own.error(f"no argument {extra[0]!r}: {_meant(parsed, extra[0], known)}")
    return parsed


def _meant(parsed: argparse.Namespace, word: str, known: Sequence[str]) -> str:
    """Return what was probably meant by a word that the command does not take."""
    if "--set" in known and (setting := _SETTING.fullmatch(word)):
        return f"a setting is changed by --set {setting[1] or setting[2]}={setting[3] or 'VALUE'}"
    if word.startswith("-"):
        return did_you_mean(word, known)
    if verbs := verbs_of(parsed.command):
        given = vars(parsed).get("file") or vars(parsed).get("target", "")
        if "/" in given or Path(given).exists():
            return f"allowed before {given!r}: {', '.join(verbs)}"
        return f"{given!r} is no verb of {parsed.command}: {did_you_mean(given, verbs)}"
    return "the command takes no more; words with blanks stand in quotes"


def _joined(arguments: Sequence[str]) -> list[str]:
    """`buffer inspect URL` is the command "buffer inspect"; `buffer CONFIG` remains "buffer".
    Options of torchrun are passed through."""
    match list(arguments):
        case ["torchrun", "-h" | "--help"] as words:
            return words
        case ["torchrun", *options]:
            return ["torchrun", "--", *options]
    two_words = " ".join(arguments[:2])
    is_verb = two_words in COMMANDS or two_words in GONE
    return [two_words, *arguments[2:]] if is_verb else list(arguments)


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of `streamrl`, and those of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="streamrl",
        usage="streamrl [-h] [--version] COMMAND ...",
        description="Asynchronous off-policy streaming reinforcement learning for language models.",
        epilog="\n".join(_grouped_summaries()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(
        prog="streamrl", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            description=command.summary,
            epilog="\n".join(_verb_summaries(name)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(entry=command.entry, imports_much=command.imports_much)
        for add in command.option_sets:
            add(sub)
    return parser, commands.choices


def _grouped_summaries() -> Iterator[str]:
    for group, commands in GROUPS.items():
        yield f"{group}:"
        for name, command in commands.items():
            verbs = ", ".join(verbs_of(name))
            yield f"  {name:<{_WIDTH}}{command.summary}{verbs and f'; {verbs}'}"
        yield ""
    yield "streamrl COMMAND --help describes the arguments of a command"


def _verb_summaries(name: str) -> Iterator[str]:
    for verb, command in verbs_of(name).items():
        yield f"  {f'{name} {verb}':<{_WIDTH + 10}}{command.summary}"
