"""The parser of the command line, and its help: the commands in their groups."""

import argparse
from collections.abc import Iterator, Sequence

from streamrl import __version__
from streamrl.cli.arguments.commands import COMMANDS, GONE, GROUPS, verbs_of
from streamrl.errors import did_you_mean

_WIDTH = max(len(name) for commands in GROUPS.values() for name in commands) + 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of the chosen command; `command` is its name, `entry` and `imports_much` are
    as `Command` has them.

    Raises:
        SystemExit: usage is wrong (exit code 2), or help or the version was printed (0).
    """
    parser = _parser()
    words = _joined(arguments)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    for word in (*words[:1], *options):
        if word in GONE:
            parser.error(f"{word} has gone: {GONE[word]}")
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
    is_verb = two_words in COMMANDS or two_words in GONE
    return [two_words, *arguments[2:]] if is_verb else list(arguments)


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
        sub = commands.add_parser(
            name,
            description=command.summary,
            epilog="\n".join(_verb_summaries(name)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(entry=command.entry, imports_much=command.imports_much)
        command.add_options(sub)
    return parser


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
