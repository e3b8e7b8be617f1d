"""The check before a launch, in a separate process: what the user's files import is freed when it
ends, and what they do to the process does not affect the launcher.

It checks only what is quick to find about the machine; `streamrl check` takes longer.

On Linux the process is forked, so it has the launcher's imports at once; elsewhere a fork may
crash.
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
    """Run the check and print its warnings. Waits for its end.

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
    """Run the check; return its exit code and what it wrote to standard error. Waits for its end,
    then kills what it has started; if interrupted, kills the check, too."""
    if sys.platform == "linux":
        context = multiprocessing.get_context("fork")
    else:
        context = multiprocessing.get_context("spawn")
    # Not a pipe, which would stay open until the last process that the check started ends.
    with tempfile.NamedTemporaryFile(prefix="streamrl-check-") as errors:
        child = context.Process(target=_check, args=(file, overrides, Path(errors.name)))
        with warnings.catch_warnings():
            # The launcher has only this thread; numpy ends its threads before a fork and restarts
            # them.
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
    """Run the check in its own process, the leader of a process group."""
    os.setsid()
    with errors.open("wb") as output:
        os.dup2(output.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 0
    try:
        # Imported here, so that the launcher need not import it.
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
    # Not sys.exit, which would wait for threads and processes that a user's file started.
    os._exit(code)
