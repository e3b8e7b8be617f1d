"""Agents that a gateway starts: a function in a thread (`generator.agent.function`), or a command
in its own process (`generator.agent.command`).

Invariant: whatever a function does to its thread, the generator's event loop continues. A process
and everything that it started end with the episode, and with this process.
"""

import asyncio
import contextlib
import inspect
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.concurrency import Threads
from actors.engines.served.process import GUARD
from actors.gateway.agent import AgentResult
from actors.gateway.apis.requests import Json
from actors.gateway.open_episodes import OpenEpisode
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.errors import LostAgentError, RolloutError, did_you_mean
from streamrl.user_code import attributed_to, is_finite_number, load_user_code


class FunctionAgent:
    """PATH.py:FUNCTION(task, base_url, api_key), which may be `async`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = load_user_code("generator.agent.function", name)
        self._threads = Threads(f"agent {name}")

    async def run(self, episode: OpenEpisode, task: Json) -> AgentResult:
        """Wait for the function. Canceling cancels an `async` function; any other function
        continues, but its requests are refused.

        Raises:
            RolloutError: it raised, or returned something other than a finite number or None.
        """
        episode.take(f"agent {self._name}")
        call = _Call(self._name, self._function, task)
        try:
            returned = await self._threads.run(call.run)
        finally:
            call.cancel()
        if returned is not None and not is_finite_number(returned):
            raise RolloutError(
                f"agent {self._name} returned {returned!r:.60}; it must be a finite number or None"
            )
        return AgentResult(None if returned is None else float(returned))


@dataclass(eq=False, repr=False)  # The task contains the episode's key.
class _Call:
    """One call; `run` is called in its thread, the rest in the event loop."""

    name: str
    function: Any
    task: Json
    _loop: asyncio.AbstractEventLoop | None = None
    _running: asyncio.Task[Any] | None = None

    def run(self) -> Any:
        """Call the function and return its result."""
        task = dict(self.task)
        with attributed_to(f"agent {self.name}", RolloutError):
            returned = self.function(task, task["base_url"], task["api_key"])
            is_async = inspect.isawaitable(returned)
            return asyncio.run(self._awaited(returned)) if is_async else returned

    def cancel(self) -> None:
        """Cancel the call; no effect if it is over or cannot be canceled."""
        loop, running = self._loop, self._running
        if loop is not None and running is not None:
            # The loop is closed once the call is over.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(running.cancel)

    async def _awaited(self, returned: Any) -> Any:
        self._loop, self._running = asyncio.get_running_loop(), asyncio.current_task()
        return await returned


_TAIL_BYTES = 2000
_DRAIN_S = 1.0


class CommandAgent:
    """A command line; {prompt}, {answer} and {column} in it are replaced by the task's values."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    async def run(self, episode: OpenEpisode, task: Json) -> AgentResult:
        """Start the process and wait for it. Canceling ends it and what it has started.

        Raises:
            LostAgentError: it could not be started, or its exit code was not 0.
        """
        name = f"agent `{shlex.join(self._command)}`"
        episode.take(name)
        async with _Output() as output:
            try:
                process = await _start(filled(self._command, task), task, output.descriptor)
            except (OSError, ValueError) as error:
                # A row's text may be missing, too long for an argument, or contain a NUL.
                raise LostAgentError(
                    f"{name} cannot be started ({episode.place}): {error}"
                ) from error
            output.close_descriptor()
            try:
                code = await process.wait()
                await asyncio.wait({output.reading}, timeout=_DRAIN_S)
            finally:
                assert process.stdin is not None, "it was started with a pipe"
                process.stdin.close()
        if code:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            num_turns = episode.session.record.num_turns
            raise LostAgentError(
                f"{name} ended {how} after {num_turns} completions ({episode.place}): "
                f"{output.last_line}"
            )
        return AgentResult()


class _Output:
    """Keeps the end of what a process writes to `descriptor`. This pipe is not one of `subprocess`,
    since `Process.wait` would wait until those close, and a process that has left the group may
    hold them open."""

    def __init__(self) -> None:
        self._tail = b""

    async def __aenter__(self) -> "_Output":
        readable, self.descriptor = os.pipe()
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(readable, "rb", 0)
        )
        self.reading = asyncio.create_task(self._read(reader))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_descriptor()
        self.reading.cancel()
        self._transport.close()

    def close_descriptor(self) -> None:
        """Close the descriptor once the process has inherited it, or was not started."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read until the process has closed its output. Waits for it to write."""
        while data := await reader.read(2**16):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]

    @property
    def last_line(self) -> str:
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


async def _start(command: Sequence[str], task: Json, output: int) -> asyncio.subprocess.Process:
    """Start a guarded command. The guard's standard input is a pipe from this process; when it
    closes, the guard knows that this process has ended."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(GUARD), *command),
        stdin=PIPE,
        stdout=output,
        stderr=STDOUT,
        start_new_session=True,
        env=_environment(task),
    )


def filled(command: Sequence[str], task: Json) -> list[str]:
    """Replace names in braces by the task's texts; other braces within a word stay.

    Raises:
        ValueError: a word is a name in braces, and the task has no such text.

    >>> filled(["{question}?", "{}"], {"row": {"question": "why"}, "messages": [], "answer": ""})
    ['why?', '{}']
    """
    last = task["messages"][-1]["content"] if task["messages"] else ""
    values = {**task["row"], "prompt": last, "answer": task["answer"]}

    def value(match: re.Match[str]) -> str:
        name, word = match[1], match.string
        if name not in values and match[0] == word:
            raise ValueError(
                f"{word}: its row has no column {name!r}; {did_you_mean(name, values)}"
            )
        return str(values.get(name, match[0]))

    return [re.sub(r"\{(\w+)\}", value, word) for word in command]


def _environment(task: Json) -> dict[str, str]:
    """This process's environment, without Redis' password, and with the URLs and the key of the
    episode. The agent reads its task and posts its reward at STREAMRL_SESSION_URL."""
    own = {name: value for name, value in os.environ.items() if name != REDIS_PASSWORD}
    return {
        **own,
        "OPENAI_BASE_URL": task["base_url"],
        "OPENAI_API_KEY": task["api_key"],
        "ANTHROPIC_BASE_URL": task["anthropic_base_url"],
        "ANTHROPIC_API_KEY": task["api_key"],
        "STREAMRL_SESSION_URL": task["session_url"],
    }
