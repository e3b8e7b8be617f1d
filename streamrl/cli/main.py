"""`streamrl`: the command line. Parses, loads the configuration, and starts one part by name.

Invariant: nothing heavy is imported until a command is chosen, so help and errors come at once.
Daemons and tools live on floors above this one: the table names them, and they are imported when
they run.
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from streamrl import __version__
from streamrl.errors import ConfigError, StreamRLError

Options = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """`entry` is module:function; it is given the parsed arguments and returns the exit code."""

    entry: str
    summary: str
    add_options: Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 2 for usage or a configuration that cannot work, 1 for failure."""
    parsed = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    module, _, function = parsed.entry.partition(":")
    try:
        code: int = getattr(_imported(module), function)(parsed)
    except StreamRLError as error:
        print(f"streamrl {parsed.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return code


def _imported(name: str) -> ModuleType:
    """What is imported stays for good: the collector waits until it is there, and then leaves it
    out. Each full collection of torch and transformers would stop every thread for 0.2 s."""
    if name not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


def _joined(arguments: Sequence[str]) -> list[str]:
    """`buffer inspect URL` is the command "buffer inspect"; `buffer CONFIG` remains "buffer"."""
    two_words = " ".join(arguments[:2])
    return [two_words, *arguments[2:]] if two_words in COMMANDS else list(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamrl",
        description="Asynchronous off-policy streaming reinforcement learning for language models.",
    )
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary)
        sub.set_defaults(entry=command.entry)
        command.add_options(sub)
    return parser


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("--config", metavar="CONFIG", help="the same, by name")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="change one setting; may be given more than once",
    )


def _launch(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    existing.add_argument("--new", action="store_true", help="move an existing run folder aside")
    parser.add_argument("--no-view", action="store_true", help="plain lines, no live view")


def _generator(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--id", default=None, help="name of this generator; default: made up")


def _learner(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--checkpoint", default=None, help="model folder; default: the newest")


def _books(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--require-none", action="store_true", help="only check that the buffer holds no such run"
    )
    instead.add_argument(
        "--forget", action="store_true", help="delete all that the buffer holds of the run"
    )


def _run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="run folder, such as runs/quickstart")


def _new_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="where the keys are written")


def _ablate(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument(
        "--vary", required=True, metavar="SECTION.KEY=A,B,...", help="the setting and its values"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated; default: 0,1,2")


def _inspect(parser: argparse.ArgumentParser) -> None:
    _buffer_target(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between the readings that give rates"
    )


def _drain(parser: argparse.ArgumentParser) -> None:
    _buffer_target(parser)
    _deadline(parser)


def _generators(parser: argparse.ArgumentParser) -> None:
    _buffer_target(parser)
    parser.add_argument("--json", action="store_true", help="one JSON array instead of a table")


def _one_generator(parser: argparse.ArgumentParser) -> None:
    _buffer_target(parser)
    parser.add_argument("id", metavar="ID", help="name of the generator, as the list shows it")


def _drain_generator(parser: argparse.ArgumentParser) -> None:
    _one_generator(parser)
    _deadline(parser)


def _deadline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="seconds to wait; default: 600"
    )


def _buffer_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="URL", help="zmq://host:port, or the configuration that names it"
    )


def _chaos(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--kills", type=int, default=5, help="how many; default: 5")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds without a step that mean a hang"
    )


def _parity(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--num-prompts", type=int, help="default: parity.num_prompts")
    parser.add_argument("--max-mean-gap", type=float, help="nats; default: parity.max_mean_gap")
    parser.add_argument("--max-gap", type=float, help="nats; default: parity.max_gap")
    parser.add_argument(
        "--dtypes", metavar="A,B,...", help="of the engine, one after the other; default: its own"
    )
    parser.add_argument("--out", metavar="FOLDER", help="default: the run's folder")


def _parity_sample(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--samples", required=True, metavar="FILE", help="where they are written")


def _parity_score(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--samples", required=True, nargs="+", metavar="FILE", help="what to score")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the report is written")


def _status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="RUN", help="configuration, run folder, or zmq://host:port of its buffer"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


COMMANDS = {
    "launch": Command(
        "streamrl.cli.launch:main", "run all that a configuration needs on this machine", _launch
    ),
    "check": Command(
        "streamrl.cli.check:main", "print the resolved configuration, value by value", _config
    ),
    "buffer": Command("buffers.daemon:main", "start the trajectory buffer", _config),
    "buffer audit": Command(
        "buffers.audit:main",
        "prove from the journal that no group was lost or repeated",
        _run_folder,
    ),
    "buffer inspect": Command(
        "streamrl.cli.buffer:inspect", "what a running buffer holds, for whom, since when", _inspect
    ),
    "buffer drain": Command(
        "streamrl.cli.buffer:drain", "let a running buffer empty: nothing new is leased", _drain
    ),
    "generator": Command("actors.daemon:main", "start one generator", _generator),
    "generators": Command(
        "streamrl.cli.generators:show",
        "who generates for a running buffer, and how they do",
        _generators,
    ),
    "generators cordon": Command(
        "streamrl.cli.generators:cordon", "grant a generator no further leases", _one_generator
    ),
    "generators drain": Command(
        "streamrl.cli.generators:drain",
        "have a generator finish its groups and leave, and wait for it",
        _drain_generator,
    ),
    "generators uncordon": Command(
        "streamrl.cli.generators:uncordon", "undo a cordon, or a drain under way", _one_generator
    ),
    "learner": Command("learners.daemon:main", "start the learner", _learner),
    "make-model": Command(
        "actors.make_model:main", "make the small local model that model.recipe describes", _config
    ),
    "evaluate": Command(
        "actors.evaluate:main", "greedy score of a checkpoint on held-out prompts", _evaluate
    ),
    "books": Command(
        "streamrl.cli.books:main", "write books.json of a run whose buffer is redis://", _books
    ),
    "parity": Command(
        "streamrl.cli.parity:main", "compare the log-probabilities of engine and learner", _parity
    ),
    "parity sample": Command(
        "actors.parity:main", "the engine's part of `parity` by itself", _parity_sample
    ),
    "parity score": Command(
        "learners.parity:main", "the learner's part of `parity` by itself", _parity_score
    ),
    "ablate": Command(
        "streamrl.cli.ablate:main", "one run per value of a setting and seed, compared", _ablate
    ),
    "keys new": Command("buffers.zmq.curve:main", "make the keys of buffer.curve", _new_folder),
    "chaos": Command(
        "streamrl.cli.chaos:main", "kill daemons at random moments, then check the record", _chaos
    ),
    "status": Command(
        "streamrl.cli.status:main",
        "what a run does, and what is wrong with it, on one screen",
        _status,
    ),
    "watch": Command("streamrl.cli.watch:main", "follow the progress of a run folder", _run_folder),
    "report": Command(
        "streamrl.cli.report:main", "summary table and report.png of a run folder", _run_folder
    ),
}
