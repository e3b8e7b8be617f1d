"""What runs on a node for one bundle: an actor that starts, signals and ends the plan's commands.

Invariant: nothing that it has started outlives it. What carries its MARK in the environment is
killed by a watcher, a process of its own whose input is a pipe of the actor's: it closes when the
actor ends, in whatever way. Secrets come as arguments of calls, and stand in no log.

`python -m` of this module is the watcher. Nothing here imports Ray before it is asked for what Ray
gave; the first answer is of plain values, so that another release can be told.
"""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import uuid
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl import __version__
from streamrl.checkpoints.manifest import MANIFEST_FILE, verify
from streamrl.cli.processes.mirror import Mirror, complete_checkpoints
from streamrl.cli.processes.restarts import launcher_line
from streamrl.config import RunConfig
from streamrl.config.addresses import bound_socket
from streamrl.durable_files import link_folder, visible_files, write_file
from streamrl.errors import (
    DamagedCheckpointError,
    ErrorPipe,
    ErrorRecord,
    StreamRLError,
    UnreadableCheckpointError,
    sentence_of,
)
from streamrl.placement.hosts import this_machine
from streamrl.placement.plan import without_chosen
from streamrl.run_folder import held_run, move_aside
from streamrl.service import processes_with

MARK = "STREAMRL_PROCESS"
NUM_PORTS = 3
_TRIES = 100
_KEPT, _NONE = ".kept", ("", (0, 0))


class Supervisor:
    """One for each bundle."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._starts: dict[str, asyncio.Task[Process]] = {}
        self._held: list[socket.socket] = []
        self._folder = self._directory = Path()
        self._listing = asyncio.Lock()
        self._kept = _NONE
        """Where the newest checkpoint is, and size and time of its manifest."""
        self._watched_by = _start_watcher(self._mark)

    async def hello(
        self, folder: str, launch_id: str, directory: tuple[str, int]
    ) -> dict[str, Any]:
        """What this node is, and whether it sees the run's folder and the working folder of the
        driver, a path and its inode."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        here = this_machine(address=address)
        given = context.get_accelerator_ids().get("GPU", [])
        known = list(here.devices) + [None] * (len(given) - len(here.devices))
        self._folder = Path(folder)
        shares = shares_directory = False
        with contextlib.suppress(OSError):
            shares = (self._folder / "launch.id").read_text() == launch_id
            shares_directory = shares and os.stat(directory[0]).st_ino == directory[1]
        self._directory = Path(directory[0]) if shares_directory else self._folder / "files"
        return {
            "release": __version__,
            "address": address,
            "node": context.get_node_id(),
            "interface": here.interface,
            "devices": [
                (index, device.memory_bytes if device else 0, device.name if device else "", name)
                for index, (name, device) in enumerate(zip(given, known, strict=False))
            ],
            "shares_folder": shares,
            "shares_directory": shares_directory,
        }

    async def hold_ports(self, host: str, named: Mapping[str, int]) -> tuple[int, str]:
        """Keep for the processes here the ports that settings name, and NUM_PORTS free ones: the
        first of these, and why one that a setting names cannot be had, or ""."""
        for setting, port in named.items():
            try:
                self._held.append(bound_socket(host, port))
            except OSError as error:
                why = error.strerror or error
                return 0, f"{setting}: port {port} of node {host} is taken: {why}"
        for _ in range(_TRIES):
            held = [bound_socket(host)]
            first = int(held[0].getsockname()[1])
            with contextlib.suppress(OSError):
                held += [bound_socket(host, first + index) for index in range(1, NUM_PORTS)]
                self._held += held
                return first, ""
            for one in held:
                one.close()
        raise OSError(f"{host} has no {NUM_PORTS} free ports side by side")

    async def fetch(self, config: RunConfig, environment: Mapping[str, str]) -> str:
        """Take the run from its mirror where that has more of it than this node; why that cannot
        be, or ""."""
        os.environ.update(environment)
        try:
            await asyncio.to_thread(Mirror(config, print).fetch, is_right=True)
        except StreamRLError as error:
            return str(error)
        return ""

    async def prepare(
        self, files: bytes, private: Mapping[str, bytes], required: Sequence[str], *, is_new: bool
    ) -> str:
        """Write what the driver has, as a tar archive of the working folder and as files that
        their owner alone can read; the first required path that is not here, or "". An older run
        is moved aside where this is a new one."""
        if is_new and held_run(self._folder):
            move_aside(self._folder)
        return await asyncio.to_thread(self._write, files, private, required)

    def _write(self, files: bytes, private: Mapping[str, bytes], required: Sequence[str]) -> str:
        for path, content in private.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another bundle of this node may write the same file, or read it.
            write_file(Path(path), content, is_private=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        if files:
            with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                archive.extractall(self._directory, filter="data")
        return next((path for path in required if not os.path.exists(path)), "")

    async def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_format: str
    ) -> tuple[int, ErrorRecord | None]:
        """Exit code and record of the command, which begins here. Waits for its end; then nothing
        of it is left."""
        log = self._folder / "logs" / f"{name}.log"
        with ErrorPipe() as pipe:
            # Before anything is waited for, so that a signal that comes now is for it.
            task = asyncio.ensure_future(self._start(name, command, environment, log, pipe))
            self._starts[name] = task
            try:
                process = await task
            except OSError as error:
                sentence = f"cannot start {command[0]}: {error.strerror or error}"
                return 1, ErrorRecord(1, sentence, "")
            code, record = await process.wait(), pipe.read()
        await end_left(f"{self._mark}:{name}:")
        if code != 0:
            line = launcher_line(name, sentence_of(code, record), log_format)
            with contextlib.suppress(OSError), log.open("a") as output:
                print(line, file=output)
        return code, record

    async def files(self, prefix: str) -> dict[str, tuple[int, int]]:
        """Size and time, in ns, of the files whose names in the run's folder begin so. The newest
        checkpoint among them can be read until the next call, though a learner deletes it."""
        # A driver that gave up one call may have made the next.
        async with self._listing:
            return await asyncio.to_thread(self._list, prefix)

    def _list(self, prefix: str) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        # Sizes of after all were found, so that the records have the lines of each checkpoint.
        names = {str(path.relative_to(self._folder)): path for path in visible_files(self._folder)}
        for name, path in names.items():
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found[name] = (status.st_size, status.st_mtime_ns)
        newest = f"checkpoints/{max(complete_checkpoints(found), default='')}/"
        kept = (newest, found.get(newest + MANIFEST_FILE, (0, 0)))
        if kept != self._kept:
            # Another history may have a checkpoint of the same name.
            self._kept = _NONE
            links = self._folder / _KEPT
            if kept[1] != (0, 0) and link_folder(self._folder / newest, links):
                with contextlib.suppress(DamagedCheckpointError, UnreadableCheckpointError):
                    verify(links, contents=False)
                    self._kept = kept
        return found

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """A part of a file of the run's folder; nothing of one that is gone."""
        files, (kept, _) = [self._folder / path], self._kept
        if kept and path.startswith(kept):
            files = [self._folder / _KEPT / path.removeprefix(kept), *files]
        for file in files:
            with contextlib.suppress(OSError), file.open("rb") as content:
                content.seek(offset)
                return content.read(size)
        return b""

    async def signal(self, name: str, number: int) -> None:
        """Send the signal to the command, if it runs; SIGKILL to all of its group. Waits for its
        start."""
        if name not in self._starts:
            return
        with contextlib.suppress(OSError):
            process = await asyncio.shield(self._starts[name])
            if process.returncode is None and number == signal.SIGKILL:
                os.killpg(process.pid, number)
            elif process.returncode is None:
                os.kill(process.pid, number)

    async def _start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        pipe: ErrorPipe,
    ) -> Process:
        log.parent.mkdir(parents=True, exist_ok=True)
        beside = str(Path(sys.executable).parent)
        # Ray chooses the threads of its workers by itself.
        own = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") and key != "OMP_NUM_THREADS"
        }
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self._directory,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **own,
                    "PATH": f"{beside}:{os.environ.get('PATH', os.defpath)}",
                    MARK: f"{self._mark}:{name}:",
                    **without_chosen(environment, own),
                    **pipe.environment,
                },
                pass_fds=(pipe.descriptor,),
            )
        # Ray lets its workers yield to every other process of a node, by RAY_worker_niceness, and
        # so would what they start; as urgent as Ray itself, which is the parent here, it is as by
        # `launch`. Without the right to that it stays as it is.
        with contextlib.suppress(OSError):
            urgency = os.getpriority(os.PRIO_PROCESS, os.getppid())
            os.setpriority(os.PRIO_PROCESS, process.pid, urgency)
        return process


def _start_watcher(mark: str) -> int:
    """The end of a pipe that this process has to keep. Waits until the watcher is on its own."""
    read_end, write_end = os.pipe()
    command = (sys.executable, "-m", __name__, mark)
    subprocess.run(command, stdin=read_end, start_new_session=True, check=True)
    os.close(read_end)
    return write_end


async def end_left(mark: str) -> None:
    """Kill every process with a MARK that begins so; waits until there is none. What a kill brings
    to light is looked for again."""
    while left := processes_with(MARK, lambda value: value.startswith(mark)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


def _watch(mark: str) -> None:
    """Waits for the end of the actor. Not as its child: Ray kills those that it leaves."""
    if os.fork():
        os._exit(0)
    while os.read(0, 1):
        pass
    asyncio.run(end_left(mark))


if __name__ == "__main__":
    _watch(sys.argv[1])
