"""`streamrl`: the command line. Parses the arguments and runs the command that they name.

Invariant: nothing heavy is imported before a command is chosen and its configuration, if it takes
one, is known to be valid; so help and errors appear at once.
"""

import argparse
import errno
import gc
import importlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from streamrl.cli.arguments.commands import parse
from streamrl.errors import Interrupted, StreamRLError, exit_code_of, leave_record

# What a shell reports for a process that SIGPIPE ended.
EXIT_BROKEN_PIPE = 141
EXIT_S = 4.0
_MANY_FILES = 65_536
DAEMONS = ("buffer", "generator", "learner", "validator")
# The value of `streamrl.log_lines.FORMAT_VARIABLE`, without that module's imports.
FORMAT_VARIABLE = "STREAMRL__RUN__LOG_FORMAT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, by the kind of its failure (docs/operating.md)."""
    try:
        parsed = parse(sys.argv[1:] if arguments is None else arguments)
        code = _run(parsed)
    except KeyboardInterrupt as interruption:
        number = interruption.number if isinstance(interruption, Interrupted) else signal.SIGINT
        return 128 + number
    if parsed.command in DAEMONS and arguments is None:
        _leave(code)
    return code


def _run(parsed: argparse.Namespace) -> int:
    _open_many_files()
    if parsed.command in DAEMONS and os.environ.get(FORMAT_VARIABLE) == "json":
        import_command("streamrl.log_lines").log_as_json(parsed.command)
    if parsed.command in (*DAEMONS, "launch"):
        # transformers reads this at its import; in a log every state of a bar would be a line.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    module, _, function = parsed.entry.partition(":")
    try:
        if parsed.imports_much:
            configuration = import_command("streamrl.config.loading.load").configuration
            parsed.run_config = configuration(parsed).config
        ended = getattr(import_command(module), function)(parsed)
        code: int = ended if isinstance(ended, int) else import_command("asyncio").run(ended)
        # print, since sys.stdout is None if the shell has closed it.
        print(end="", flush=True)
        return code
    except (StreamRLError, ImportError) as error:
        return _report(parsed.command, error)
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except SystemExit as end:
        # A console of rich catches the error and ends the program.
        if isinstance(end.__context__, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        raise
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            _discard_output()
        where = error.filename or "the output"
        return _report(parsed.command, StreamRLError(f"{where}: {error.strerror}"))
    except Exception as error:
        leave_record(error)
        raise


def _open_many_files() -> None:
    """Raise the limit of open files to the hard limit: the usual 1024 is too low for NCCL on a few
    hosts, a launcher's daemons and an evaluation's episodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        # macOS allows fewer than it reports.
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _leave(code: int) -> None:
    """End the process after EXIT_S at the latest: the interpreter waits for every thread, and a
    call of a user's code may never return."""
    leaving = threading.Timer(EXIT_S, os._exit, (code,))
    leaving.daemon = True
    leaving.start()


def _report(command: str, error: Exception) -> int:
    """Say why the command failed, to the process that started it or here; return the exit code."""
    if not leave_record(error):
        print(f"streamrl {command}: {error}", file=sys.stderr)
    return exit_code_of(error)


def _discard_output() -> None:
    """Discard what the reader of a pipe, such as `head`, has not read, so that the exit does not
    fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def import_command(name: str) -> ModuleType:
    """Import a module and keep everything that it imports out of garbage collection.

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
