"""A script of this folder as a program: arguments, exit code, and what it says of an error."""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from streamrl.cli.arguments import options
from streamrl.errors import Interrupted, StreamRLError, exit_code_of


def run_script(
    parser: ArgumentParser,
    main: Callable[[Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """The exit code, by the kind of the failure as of `streamrl`; see docs/operating.md."""
    parsed = parser.parse_args(arguments)
    try:
        return main(parsed)
    except (StreamRLError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt as interruption:
        number = interruption.number if isinstance(interruption, Interrupted) else signal.SIGINT
        return 128 + number


def add_stall_timeout(parser: ArgumentParser) -> None:
    """Of a script that runs a launch to its end."""
    parser.add_argument(
        "--stall-timeout",
        type=options.seconds,
        default=120.0,
        metavar="SECONDS",
        help="time without a step after which the run has failed; default: 120",
    )
