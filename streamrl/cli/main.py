"""`streamrl`: the command line. Parses the arguments and runs the command that they name.

Invariant: nothing heavy is imported until a command is chosen, so help and errors come at once.
"""

import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from streamrl.cli.arguments.parser import parse
from streamrl.errors import ConfigError, StreamRLError

# As a shell reports a process that SIGPIPE ended.
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 2 for usage or a configuration that cannot work, 1 for failure."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    module, _, function = parsed.entry.partition(":")
    try:
        code: int = getattr(import_command(module), function)(parsed)
        sys.stdout.flush()
    except StreamRLError as error:
        print(f"streamrl {parsed.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            _discard_output()
        where = error.filename or "the output"
        print(f"streamrl {parsed.command}: {where}: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _discard_output() -> None:
    """What the reader of a pipe, such as `head`, has not read is written nowhere at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def import_command(name: str) -> ModuleType:
    """Import a module and keep all that it imports out of garbage collection.

    Modules stay until the process ends. A full collection that visits torch and transformers
    stops every thread for 0.2 s.
    """
    if name not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


if __name__ == "__main__":
    sys.exit(main())
