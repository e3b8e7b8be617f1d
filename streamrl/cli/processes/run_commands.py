"""What every launch does before and after running the daemons, and the commands that it runs once.

Invariant: commands get the run's resolved configuration, from the run's folder. While a launch
lives, no other launch changes the run's folder, here or on other machines that share the file
system. The lock is beside the folder, since `--new` moves the folder; it is released when the
process ends, in whatever way. Used by `streamrl.cli.launch` and the other launchers, and by the
chaos and soak tests.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from buffers.journal.sqlite import journal_path, open_to_read, read_snapshot
from streamrl.checkpoints.find import newest, require_steps_to_launch
from streamrl.cli.processes.command import call
from streamrl.cli.processes.fork_server import ForkServer
from streamrl.cli.processes.mirror import Mirror, mirror_of, mirrored
from streamrl.cli.report import reported
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.durable_files import is_locked, write_file
from streamrl.errors import PARENT_VARIABLE, ConfigError, StreamRLError
from streamrl.run_folder import EVALUATION_FILE, prepare, read_books
from streamrl.service import processes_with
from streamrl.tracking.jsonl import TRAINED_FILE, read_lines, read_validations

_LOCKS = ".launches"
_POLL_S = 1.0


@contextmanager
def sole_launch(folder: Path, wait_s: float = 0.0, orphans_s: float = 0.0) -> Iterator[None]:
    """Lock the run in this folder for the block. Waits at most `wait_s` for another launch to end:
    a file server keeps the lock of a lost machine for a while. Then waits at most `orphans_s` for
    the processes of a launch that was killed here: they still write to the folder, and hold
    addresses and devices.

    Raises:
        ConfigError: another launch of the run is under way, or the lock cannot be written.
    """
    file = folder.parent / _LOCKS / folder.name
    try:
        if not file.parent.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # Everyone who may write runs there may lock them. Some file systems have no modes.
            with suppress(OSError):
                file.parent.chmod(folder.parent.stat().st_mode & 0o7777)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write {file}: {error.strerror}") from error
    try:
        _lock(descriptor, folder, wait_s)
        _await_orphans(descriptor, folder, orphans_s)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            # A failed file server must not hide why the launch ends.
            with suppress(OSError):
                os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, wait_s: float) -> None:
    if is_locked(descriptor):
        return
    if wait_s:
        print(
            f"{_held(descriptor, folder)}, or its node is gone; waiting for its lock, {wait_s:g} s "
            "at most",
            file=sys.stderr,
        )
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        if is_locked(descriptor):
            return
    raise ConfigError(f"{_held(descriptor, folder)}: stop it, or choose another run.name")


def _await_orphans(descriptor: int, folder: Path, wait_s: float) -> None:
    """Wait at most `wait_s` for the processes that a killed launch left on this host; the lock
    file still names that launch."""
    launch, _, host = _holder(descriptor).removeprefix("process ").partition(" of ")
    if host != socket.gethostname() or Path(f"/proc/{launch}").exists():
        return
    until_s, is_said = time.monotonic() + wait_s, False
    while time.monotonic() < until_s and (pids := processes_with(PARENT_VARIABLE, launch.__eq__)):
        if not is_said:
            print(
                f"run.name: process {launch}, a launch of {folder}, was killed; waiting for the "
                f"end of what it has started ({', '.join(map(str, sorted(pids)))}), {wait_s:g} s "
                "at most",
                file=sys.stderr,
            )
        is_said = True
        time.sleep(_POLL_S)


def _held(descriptor: int, folder: Path) -> str:
    return f"run.name: {_holder(descriptor)} is a launch of {folder} already"


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 300, 0).decode(errors="replace")


def call_for(
    config: RunConfig, command: str, *arguments: str, fork_server: ForkServer | None = None
) -> str:
    """Run a command of `streamrl` with the run's configuration; return its output."""
    file = str(config.run.path / RESOLVED_FILE)
    return call(*command.split(), *arguments, "--config", file, fork_server=fork_server)


def books_option(*, resume: bool, new: bool) -> str | None:
    """Return the option of `streamrl buffer books` to use before a run in Redis; None if the run is
    continued. Redis outlives runs: a new run of a known name is refused before anything starts,
    since its learner would be refused later."""
    return None if resume else "--forget" if new else "--require-none"


def require_books(config: RunConfig, *, resume: bool, new: bool) -> None:
    """Raise ConfigError if Redis holds a run of this name; if the run is `new`, delete that one."""
    option = books_option(resume=resume, new=new)
    if option is not None and not config.buffer.binds_url:
        call_for(config, "buffer books", option)


@contextmanager
def launching(
    config: RunConfig,
    arguments: argparse.Namespace,
    console: Console,
    *,
    binds: bool = True,
    are_rows_checked: bool = False,
    wait_s: float = 0.0,
) -> Iterator[tuple[RunConfig, Mirror | None]]:
    """The frame of every launch: prepares the run's folder and yields the configuration and the
    mirror.

    `wait_s` is for `sole_launch`, the arguments before it are for `prepare`.
    """
    resume, new = arguments.resume, arguments.new
    with sole_launch(config.run.path, wait_s, config.stop_within_s):
        mirror = mirror_of(config, arguments, console)
        checkpoint = require_steps_to_launch(config, resume=resume, new=new)
        if checkpoint is not None and checkpoint.policy_version == config.run.max_steps:
            console.print(
                f"run.max_steps: {checkpoint.path} is of the last step, and none is left to train; "
                "--resume --set run.max_steps=N goes on to step N, --new starts anew",
                soft_wrap=True,
                highlight=False,
            )
        config = prepare(
            config,
            resume=resume,
            new=new,
            binds=binds,
            are_rows_checked=are_rows_checked,
            next_prompt_index=_next_prompt_index,
        )
        with mirrored(mirror), reported(config, arguments, console):
            yield config, mirror


def _next_prompt_index(folder: Path) -> int:
    """Return the first prompt that was never leased, by all books and records of the run that are
    here."""
    checkpoint = newest(folder, contents=False)
    books = (read_books(folder), None if checkpoint is None else checkpoint.books)
    known = [of.next_prompt_index for of in books if of is not None]
    for line in read_lines(folder / TRAINED_FILE):
        known.append(1 + max(line["prompt_indices"], default=-1))
    if journal_path(folder).exists():
        with open_to_read(journal_path(folder)) as db:
            known.append(read_snapshot(db).next_prompt_index)
    return max(known, default=0)


def make_missing_model(
    config: RunConfig, console: Console, fork_server: ForkServer | None = None
) -> None:
    """Make the model of `model.recipe` on this machine, if it is missing."""
    if config.model.missing is not None:
        console.print(f"making {config.model.path} of model.recipe")
        call_for(config, "get-model", fork_server=fork_server)


def evaluate_final(config: RunConfig, fork_server: ForkServer | None = None) -> None:
    """Write `evaluation.json` for the final checkpoint, if the run evaluates it."""
    with evaluation_may_fail():
        if config.is_evaluated and not take_validated_score(config):
            call_for(config, "evaluate", fork_server=fork_server)


def take_validated_score(config: RunConfig) -> bool:
    """Write the validator's score of the final checkpoint to `evaluation.json`. Return False if
    there is none, or the validator samples differently from `streamrl evaluate`."""
    checkpoint = newest(config.run.path, contents=False)
    if checkpoint is None or not config.final_is_validated:
        return False
    found = read_validations(config.run.path).get(checkpoint.policy_version)
    if found is None or "validation/mean@1" not in found:
        return False
    left_out = {n: int(found.get(f"validation/{n}", 0)) for n in ("num_too_long", "num_failed")}
    scored = {
        "model": str(checkpoint.path),
        "num_prompts": int(found["validation/num_prompts"]),
        **{name: count for name, count in left_out.items() if count},
        "greedy_reward_mean": found["validation/mean@1"],
        "response_length_mean": found["validation/response_length_mean"],
        "by": "validator",
    }
    write_file(config.run.path / EVALUATION_FILE, json.dumps(scored) + "\n")
    return True


@contextmanager
def evaluation_may_fail() -> Iterator[None]:
    """Around the evaluation of the final checkpoint: print a failure, which does not fail the
    run."""
    try:
        yield
    except StreamRLError as error:
        print(f"no evaluation: {error}", file=sys.stderr)
