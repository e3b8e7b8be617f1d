"""The parser of the command line, and its help: the commands in their groups."""

import argparse
from collections.abc import Iterator, Sequence

from streamrl import __version__
from streamrl.cli.arguments.commands import COMMANDS, GONE, GROUPS
from streamrl.errors import did_you_mean

_WIDTH = max(len(name) for name in COMMANDS) + 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of the chosen command; `command` is its name, `entry` and `imports_much` are
    as `Command` has them.

    Raises:
        SystemExit: usage is wrong (exit code 2), or help or the version was printed (0).
    """
    parser = _parser()
    words = _joined(arguments)
    if words and words[0] in GONE:
        parser.error(f"{words[0]} is gone: {GONE[words[0]]}")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"no command {words[0]!r}: {did_you_mean(words[0], COMMANDS)}")
    return parser.parse_args(words)


def _joined(arguments: Sequence[str]) -> list[str]:
    """`buffer inspect URL` is the command "buffer inspect"; `buffer CONFIG` remains "buffer". The
    options of torchrun are its own."""
    match list(arguments):
        case ["torchrun", "-h" | "--help"] as words:
            return words
        case ["torchrun", *options]:
            return ["torchrun", "--", *options]
    two_words = " ".join(arguments[:2])
    return [two_words, *arguments[2:]] if two_words in COMMANDS else list(arguments)


def _parser() -> argparse.ArgumentParser:
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
        sub = commands.add_parser(name, description=command.summary)
        sub.set_defaults(entry=command.entry, imports_much=command.imports_much)
        command.add_options(sub)
    return parser


def _grouped_summaries() -> Iterator[str]:
    for group, commands in GROUPS.items():
        yield f"{group}:"
        for name, command in commands.items():
            yield f"  {name:<{_WIDTH}}{command.summary}"
        yield ""
    yield "streamrl COMMAND --help describes the arguments of a command"
