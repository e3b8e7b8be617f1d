"""The agent of a run on one host: started over ssh, it starts the host's processes.

    python -P -m streamrl.cli.launchers.ssh.agent       frames come by stdin and go by stdout

It ends every process and itself when its input ends (the launcher is gone, or its ssh), when
nothing has come for `silence_s` (the host is cut off), or when another agent of the run is started
on the host. Until then a cut connection changes nothing: logs go to the run folder of the host, and
the launcher gets what is new when the connection works again.

Invariant: one agent for each run and host; when it has ended, so have its processes.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from streamrl.cli.launchers.ssh.agent import files
from streamrl.cli.launchers.ssh.agent.folder import enter, take_over
from streamrl.cli.launchers.ssh.agent.growing import GrowingFiles
from streamrl.cli.launchers.ssh.agent.processes import HostProcesses
from streamrl.cli.launchers.ssh.agent.survey import survey
from streamrl.cli.launchers.ssh.frames import (
    LINE_BYTES,
    Beat,
    Begin,
    Compare,
    Ended,
    Flush,
    FromAgent,
    Gather,
    Join,
    Joined,
    Part,
    Refused,
    Send,
    Start,
    ToAgent,
    Written,
    encode,
    read_frame,
)
from streamrl.errors import StreamRLError


class Agent:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.json.Decoder(ToAgent)
        self._begin = Begin()
        self._folder = Path()
        self._processes = HostProcesses(Path(), "")
        self._gathered: GrowingFiles | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_s = time.monotonic()
        self._is_ending = False

    async def run(self) -> None:
        """Until the launcher is gone, or a signal comes."""
        work = (self._obey(), self._watch_silence(), _signaled())
        tasks = [asyncio.create_task(part) for part in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._is_ending = True
            for task in done:
                if (error := task.exception()) is not None:
                    await self._send(Refused(sentence=str(error)))
        finally:
            await self._processes.end_all()

    async def _obey(self) -> None:
        """Waits for frames; unblocked by one, or by the end of the input."""
        while (read := await read_frame(self._reader, self._decoder)) is not None:
            self._heard_s = time.monotonic()
            await self._handle(*read)

    async def _watch_silence(self) -> None:
        """Until nothing has come for too long. Looks once a second."""
        while (left_s := self._heard_s + self._begin.silence_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, 1.0))
        raise StreamRLError(f"it heard nothing for {self._begin.silence_s:g} s")

    async def _handle(self, frame: ToAgent, body: bytes) -> None:
        match frame:
            case Begin():
                self._begin = frame
                await self._send(await asyncio.to_thread(survey, frame.address))
            case Join():
                await self._join(frame)
            case Compare():
                await self._send(await asyncio.to_thread(files.compare, frame))
            case Part():
                await asyncio.to_thread(_write, frame, body)
            case Flush():
                await self._send(Written())
            case Gather():
                self._gathered = GrowingFiles(
                    self._folder, frame.patterns, frame.sizes, self._send_body
                )
                self._go_on_with(self._gathered.run())
            case Start():
                self._go_on_with(self._report(self._processes.run(frame)))
            case Send():
                self._processes.send(frame.name, frame.signal)
            case Beat():
                pass

    async def _join(self, join: Join) -> None:
        self._folder = Path(join.folder)
        self._processes = HostProcesses(self._folder, self._begin.host)
        lock = self._folder.parent / f".{self._folder.name}.{self._begin.host}.agent"
        await take_over(lock)
        await self._processes.end_all()
        shares_folder = enter(self._folder, join)
        await self._send(Joined(shares_folder=shares_folder))

    async def _report(self, process: Coroutine[Any, Any, Ended]) -> None:
        """Waits for the process to end."""
        ended = await process
        if self._gathered is not None:
            await self._gathered.send_new()
        if not self._is_ending:
            await self._send(ended)

    def _go_on_with(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, frame: FromAgent) -> None:
        await self._send_body(frame, b"")

    async def _send_body(self, frame: FromAgent, body: bytes) -> None:
        """Waits while the connection takes nothing; nothing else waits for that."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(encode(frame, body))
            await self._writer.drain()


async def _signaled() -> None:
    """Waits for a signal, such as that of a machine that shuts down."""
    loop = asyncio.get_running_loop()
    signaled: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not signaled.done():
            signaled.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)
    raise StreamRLError(f"its agent got {(await signaled).name} and ends its processes")


def _write(part: Part, body: bytes) -> None:
    try:
        files.write(part, body)
    except OSError as error:
        raise StreamRLError(f"cannot write {part.path}: {error.strerror}") from error


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    await Agent(reader, asyncio.StreamWriter(transport, protocol, reader, loop)).run()
    # What the connection has not taken by now is lost with it.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
