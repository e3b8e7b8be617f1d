"""The check before a launch, in a process of its own: what the user's files import is freed when it
ends, and what they do to their process is not done to the launcher's.

Of the machine it looks at what can be said at once; `streamrl check` takes longer.

Linux forks it, so that it has the launcher's imports at once; elsewhere a fork may crash.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from streamrl.config.loading.load import config_file, load_usable
from streamrl.errors import EXIT_CONFIG, ConfigError, StreamRLError, exit_code_of
from streamrl.findings import Severity

_REFUSED = "streamrl check: "


def require_startable(arguments: argparse.Namespace) -> None:
    """Print the warnings of a check. Waits for its end.

    Raises:
        ConfigError: the run cannot start; one line for each problem.
        StreamRLError: the check itself failed.
    """
    code, messages = _run(config_file(arguments), arguments.overrides)
    before, found, problems = messages.partition(_REFUSED)
    print(before, end="", file=sys.stderr)
    if code == EXIT_CONFIG:
        raise ConfigError((problems if found else before).rstrip())
    if code != 0:
        raise StreamRLError(f"the check ended with exit code {code}: {problems}")


def _run(file: str, overrides: Sequence[str]) -> tuple[int | None, str]:
    """Exit code of the check, and what it wrote to standard error. Waits for its end; what it has
    started is killed then, and all of it if this is interrupted."""
    if sys.platform == "linux":
        context = multiprocessing.get_context("fork")
    else:
        context = multiprocessing.get_context("spawn")
    # A pipe would have its end when the last of what it starts ends.
    with tempfile.NamedTemporaryFile(prefix="streamrl-check-") as errors:
        child = context.Process(target=_check, args=(file, overrides, Path(errors.name)))
        with warnings.catch_warnings():
            # The launcher's own thread is the only one; numpy's end and begin anew at a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        assert child.pid is not None
        try:
            child.join()
        finally:
            child.kill()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return child.exitcode, errors.read().decode(errors="replace")


def _check(file: str, overrides: Sequence[str], errors: Path) -> None:
    """In the process of its own, which leads a group of what it starts."""
    os.setsid()
    with errors.open("wb") as output:
        os.dup2(output.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 0
    try:
        # Imported here, so that the launcher imports none of it.
        from streamrl.cli.check.command import machine_problems, refusals, run_findings

        loaded, refused = load_usable(file, overrides)
        found = [*machine_problems(loaded.config.run.path), *run_findings(loaded, refused)]
        problems = refusals(found)
        for finding in found:
            if finding.severity is not Severity.OK and str(finding) not in problems:
                remedy = f"; {finding.remedy}" if finding.remedy else ""
                print(f"warning: {finding}{remedy}", file=sys.stderr)
        if problems:
            raise ConfigError("\n".join(problems))
    except (StreamRLError, ImportError) as error:
        print(f"{_REFUSED}{error}", file=sys.stderr)
        code = exit_code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, which waits for threads and processes that a user's file has started.
    os._exit(code)
