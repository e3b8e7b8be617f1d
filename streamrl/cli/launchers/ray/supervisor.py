"""The actor that runs on a node for one bundle; it starts, signals and ends the plan's commands.

Invariant: nothing that it has started outlives it. A separate watcher process reads a pipe that
closes when the actor ends, in whatever way, and then kills every process with the actor's MARK in
its environment. Secrets come as arguments of calls, and appear in no log.

`python -m` of this module is the watcher. Ray is imported only when an answer needs it; the first
answer consists of plain values, so another release can be recognized.
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
    """The supervisor of one bundle."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._starts: dict[str, asyncio.Task[Process]] = {}
        self._held: list[socket.socket] = []
        self._folder = self._directory = Path()
        self._listing = asyncio.Lock()
        self._kept = _NONE
        """The folder of the newest checkpoint, and its manifest's size and time."""
        self._watched_by = _start_watcher(self._mark)

    async def hello(
        self, folder: str, launch_id: str, directory: tuple[str, int]
    ) -> dict[str, Any]:
        """Describe this node, and say whether it sees the run's folder and the driver's working
        folder (`directory`: a path and its inode)."""
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
        """Reserve the ports that settings name, and NUM_PORTS adjacent free ones, for the processes
        here. Return the first free one, and why a named port is not available, or ""."""
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
        """Fetch the run from its mirror, if that has more of it than this node. Return why that
        failed, or ""."""
        os.environ.update(environment)
        try:
            await asyncio.to_thread(Mirror(config, print).fetch, is_right=True)
        except StreamRLError as error:
            return str(error)
        return ""

    async def prepare(
        self, files: bytes, private: Mapping[str, bytes], required: Sequence[str], *, is_new: bool
    ) -> str:
        """Write the driver's files: a tar archive of the working folder, and private files that
        only their owner can read. Return the first required path that is not here, or "". If the
        run is new, an older one is moved aside."""
        if is_new and held_run(self._folder):
            move_aside(self._folder)
        return await asyncio.to_thread(self._write, files, private, required)

    def _write(self, files: bytes, private: Mapping[str, bytes], required: Sequence[str]) -> str:
        for path, content in private.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another bundle on this node may write or read the same file.
            write_file(Path(path), content, is_private=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        if files:
            with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                archive.extractall(self._directory, filter="data")
        return next((path for path in required if not os.path.exists(path)), "")

    async def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_format: str
    ) -> tuple[int, ErrorRecord | None]:
        """Run a command; return its exit code and record. Waits for its end, and until nothing that
        it started is left."""
        log = self._folder / "logs" / f"{name}.log"
        with ErrorPipe() as pipe:
            # Registered before any wait, so that a signal that comes now reaches it.
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
        """Size and time (ns) of the run folder's files whose names begin with `prefix`. The newest
        checkpoint among them can be read until the next call, even if the learner deletes it."""
        # A driver that gave up on one call may already make the next.
        async with self._listing:
            return await asyncio.to_thread(self._list, prefix)

    def _list(self, prefix: str) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        # Sizes are read after all files were found, so the records have the lines of each
        # checkpoint.
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
        """A part of a file in the run's folder; b"" if the file is gone."""
        files, (kept, _) = [self._folder / path], self._kept
        if kept and path.startswith(kept):
            files = [self._folder / _KEPT / path.removeprefix(kept), *files]
        for file in files:
            with contextlib.suppress(OSError), file.open("rb") as content:
                content.seek(offset)
                return content.read(size)
        return b""

    async def signal(self, name: str, number: int) -> None:
        """Send a signal to the command, if it runs; SIGKILL goes to its whole group. Waits until it
        has started."""
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
        # Ray sets OMP_NUM_THREADS for its workers, which is not for this command.
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
        # Ray lowers the priority of its workers (RAY_worker_niceness), and what they start inherits
        # it. Give the command the priority of Ray itself, the parent here, as under `launch`, if
        # this user may.
        with contextlib.suppress(OSError):
            urgency = os.getpriority(os.PRIO_PROCESS, os.getppid())
            os.setpriority(os.PRIO_PROCESS, process.pid, urgency)
        return process


def _start_watcher(mark: str) -> int:
    """Start the watcher; return the end of the pipe that this process must keep open. Waits until
    the watcher is detached."""
    read_end, write_end = os.pipe()
    command = (sys.executable, "-m", __name__, mark)
    subprocess.run(command, stdin=read_end, start_new_session=True, check=True)
    os.close(read_end)
    return write_end


async def end_left(mark: str) -> None:
    """Kill every process whose MARK begins with `mark`, and look again until there is none."""
    while left := processes_with(MARK, lambda value: value.startswith(mark)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


def _watch(mark: str) -> None:
    """Wait for the end of the actor, then kill what it left. The watcher is not the actor's child,
    since Ray kills those."""
    if os.fork():
        os._exit(0)
    while os.read(0, 1):
        pass
    asyncio.run(end_left(mark))


if __name__ == "__main__":
    _watch(sys.argv[1])
