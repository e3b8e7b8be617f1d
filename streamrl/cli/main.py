"""`streamrl`: the command line. Parses the arguments and runs the command that they name.

Invariant: nothing heavy is imported until a command is chosen, so help and errors come at once.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from streamrl.cli.arguments.parser import parse
from streamrl.errors import ConfigError, StreamRLError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 2 for usage or a configuration that cannot work, 1 for failure."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    module, _, function = parsed.entry.partition(":")
    try:
        code: int = getattr(import_command(module), function)(parsed)
    except StreamRLError as error:
        print(f"streamrl {parsed.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return code


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
