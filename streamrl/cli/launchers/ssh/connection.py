"""One ssh session with the agent of a host.

Invariant: the session ends with this object's `close`, and with this process: the agent then ends
what it has started. A connection that is cut stays open until the host has been silent for
`silence_s`, at both ends.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.cli.launchers.ssh.frames import (
    LINE_BYTES,
    Begin,
    Ended,
    FromAgent,
    Hello,
    Part,
    Refused,
    Send,
    Start,
    ToAgent,
    encode,
    read_frame,
)
from streamrl.errors import TransportError

BEAT_S = 2.0
_Frame = TypeVar("_Frame", bound=msgspec.Struct)


class HostLostError(TransportError):
    """The host does not answer, or what it answers is no agent's; if `is_final` it would not do
    otherwise a minute later."""

    is_final = False


class Connection:
    """`sees` gets each part of a file that the host sends back."""

    def __init__(self, process: Process, sees: Callable[[Part, bytes], None]) -> None:
        self._process = process
        self._sees = sees
        self._decoder = msgspec.json.Decoder(FromAgent)
        self._said: deque[str] = deque(maxlen=20)
        self._answers: asyncio.Queue[FromAgent] = asyncio.Queue()
        self._ends: dict[str, asyncio.Future[Ended]] = {}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def open(
        cls, command: Sequence[str], sees: Callable[[Part, bytes], None]
    ) -> "Connection":
        """Start ssh, in a session of its own: Ctrl-C in the terminal is for the launcher."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=LINE_BYTES
        )
        return cls(process, sees)

    async def begin(self, begin: Begin) -> Hello:
        self.send(begin)
        return await self.answer(Hello)

    def send(self, frame: ToAgent, body: bytes = b"") -> None:
        """Does not wait; what cannot be sent is lost with the connection."""
        assert self._process.stdin is not None
        if not self._lost.done():
            self._process.stdin.write(encode(frame, body))

    async def drain(self) -> None:
        """Waits until the host has taken most of what was sent."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def answer(self, kind: type[_Frame]) -> _Frame:
        """The agent's next answer, of this kind. Waits for it, or for the connection's end.

        Raises:
            HostLostError: the connection has ended.
        """
        waiting = asyncio.ensure_future(self._answers.get())
        await first_of(waiting, self._lost)
        if not waiting.done():
            waiting.cancel()
            raise HostLostError(self._lost.result())
        frame = waiting.result()
        assert isinstance(frame, kind), "answers come in the order of the questions"
        return frame

    async def run(self, start: Start) -> Ended:
        """Start the process on the host and wait for its end.

        Raises:
            HostLostError: the connection has ended.
        """
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._ends = {**self._ends, start.name: ended}
        self.send(start)
        await first_of(ended, self._lost)
        if not ended.done():
            raise HostLostError(self._lost.result())
        return ended.result()

    def signal(self, name: str, number: int) -> None:
        self.send(Send(name=name, signal=number))

    async def lost(self) -> str:
        """Why the connection has ended. Waits for that."""
        return await asyncio.shield(self._lost)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def wait_lost(self, timeout_s: float) -> None:
        """Waits until the connection has ended, or for `timeout_s`."""
        await asyncio.wait({self._lost}, timeout=timeout_s)

    def abort(self) -> None:
        """End the connection at once."""
        # `Process.kill` would reap it first, and its exit code with it.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self, grace_period_s: float) -> None:
        """End the agent and with it what it has started. Waits for it, `grace_period_s` at most."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._lost), grace_period_s)
        self.abort()
        await asyncio.gather(self._reading, self._listening)

    async def _read(self) -> None:
        """Until the session ends. Waits for frames."""
        why = ""
        try:
            async for frame, body in self._frames():
                match frame:
                    case Refused():
                        why = frame.sentence
                    case Ended():
                        self._ends[frame.name].set_result(frame)
                    case Part():
                        self._sees(frame, body)
                    case _:
                        self._answers.put_nowait(frame)
        except (TransportError, OSError, ValueError) as error:
            why = str(error)
        self.abort()
        await self._process.wait()
        await self._listening
        self._lost.set_result(why or self._sentence())

    async def _frames(self) -> AsyncIterator[tuple[FromAgent, bytes]]:
        assert self._process.stdout is not None
        stdout, is_first = self._process.stdout, True
        while (read := await read_frame(stdout, self._decoder, skips_text=is_first)) is not None:
            is_first = False
            yield read

    async def _listen(self) -> None:
        """Keep the last lines of what ssh and Python complain about. Waits for them."""
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            async for line in self._process.stderr:
                if text := line.decode(errors="replace").strip():
                    self._said.append(text)

    def _sentence(self) -> str:
        """The reason, as ssh or the host's Python say it."""
        said = [line for line in self._said if not line.startswith(("Warning:", "**"))]
        return said[-1] if said else "the connection has ended"


async def first_of(*futures: "asyncio.Future[Any]") -> None:
    """Waits for one of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
