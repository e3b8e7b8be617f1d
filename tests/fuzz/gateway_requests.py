"""Hostile requests for a gateway: JSON that is changed anywhere, and HTTP that is none."""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.fuzz.hostile import SPECIAL_TEXTS, mutated

Reply = tuple[int, bytes]
NOISE_WAIT_S = 0.02
ANSWER_WAIT_S = 120.0
KEY = "KEY"
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
TEXT = [{"type": "text", "text": "12"}]
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "x"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "max_tokens": 3,
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "12"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "previous_response_id": None,
    "max_output_tokens": 3,
    "stream": False,
}
MESSAGES = {
    "model": "m",
    "max_tokens": 3,
    "system": TEXT,
    "messages": [
        {"role": "user", "content": "12"},
        {
            "role": "assistant",
            "content": [*TEXT, {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": TEXT}, *TEXT],
        },
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "stream": True,
}
SEEDS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/responses", RESPONSES),
    ("POST", "/v1/messages", MESSAGES),
    ("POST", f"/sessions/{KEY}/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "12"}]}),
    ("GET", "/v1/models", None),
    ("GET", f"/sessions/{KEY}", None),
    ("POST", "/sessions", {"agent": "x", "wait_s": 0}),
)
# These end the episode when they are well formed, so they are rarer.
ENDING: tuple[tuple[str, str, Any], ...] = (
    ("DELETE", f"/sessions/{KEY}", None),
    ("POST", f"/sessions/{KEY}/reward", {"reward": 1.0, "metrics": {"x": 1.0}}),
)
# JSON texts, some of which Python alone reads.
HOSTILE = (
    *("null", "true", "{}", "[]", '""', "NaN", "-Infinity", "1e999", "-1", "0", "1e308"),
    *(str(2**63), str(2**64), "9" * 400, '"\\ud800"', '"\\u0000"', "[" * 50 + "]" * 50),
    *('{"type": "text"}', '[{"type": "text", "text": 1}]', '{"a": {"a": {"a": []}}}', "[null]"),
    *(json.dumps(text) for text in SPECIAL_TEXTS),
)
NESTED = ("[" * 100_000, '{"a":' * 100_000)


def requests(target: "Target", seed: int) -> Iterator[bytes]:
    """Never ends; with the key that the target has at the moment."""
    draw = random.Random(seed)
    while True:
        method, path, body = draw.choice(ENDING if draw.random() < 0.003 else SEEDS)
        text = b"" if body is None else _changed(body, draw)
        kind = "application/json" if draw.random() < 0.98 else "text/plain"
        yield encoded(method, path.replace(KEY, target.key), text, target.headers, kind)


def _changed(body: Any, draw: random.Random) -> bytes:
    """The body's JSON with up to three values exchanged, and at times its bytes changed."""
    marks: dict[str, str] = {}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        mark = f"@{len(marks)}@"
        marks[mark] = draw.choice(NESTED if draw.random() < 0.002 else HOSTILE)
        body = _exchanged(body, mark, draw)
    text = json.dumps(body)
    for mark, hostile in marks.items():
        text = text.replace(f'"{mark}"', hostile)
    data = text.encode()
    return mutated(data, draw.getrandbits(32)) if draw.random() < 0.1 else data


def _exchanged(value: Any, mark: str, draw: random.Random) -> Any:
    """The value with one of its parts exchanged, dropped or doubled, however deep."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return mark
    if isinstance(value, dict):
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {key: part for key, part in value.items() if key != name}
        renamed = "unknown" if draw.random() < 0.05 else name
        return {**value, renamed: _exchanged(value[name], mark, draw)}
    index = draw.randrange(len(value))
    if draw.random() < 0.1:
        return [*value, value[index]]
    return [*value[:index], _exchanged(value[index], mark, draw), *value[index + 1 :]]


def encoded(
    method: str, path: str, body: bytes, headers: Mapping[str, str], kind: str = "application/json"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"Content-Type: {kind}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """One connection to a server; several requests may be under way."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)

    async def __aenter__(self) -> "Connection":
        # Larger than any answer's headers.
        self.reader, self.writer = await asyncio.open_connection(
            self._host, self._port, limit=2**20
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()

    async def ask(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Reply:
        self.writer.write(encoded(method, path, json.dumps(body).encode(), headers or {}))
        return await self.read()

    async def read(self) -> Reply:
        """The next answer; waits for it, ANSWER_WAIT_S at most."""
        async with asyncio.timeout(ANSWER_WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(head.split(" ", 2)[1])
            if "transfer-encoding: chunked" in head:
                return status, await self._chunks()
            _, has_length, rest = head.partition("content-length: ")
            length = int(rest.partition("\r\n")[0]) if has_length else 0
            return status, await self.reader.readexactly(length)

    async def _chunks(self) -> bytes:
        found = b""
        while size := int(await self.reader.readline(), 16):
            found += await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()
        return found


class Target:
    """A gateway, and the episode whose key hostile requests carry."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.key = "none"
        self._draw = random.Random(0)

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def renew(self) -> None:
        """Ends the episode, and takes another; waits for one to be offered."""
        async with Connection(self._url) as connection:
            await connection.ask("DELETE", f"/sessions/{self.key}", {})
            status, task = await connection.ask("POST", "/sessions", {"wait_s": 60})
            assert status == 200, task
            self.key = json.loads(task)["api_key"]

    async def send(self, batch: list[bytes]) -> list[Reply]:
        """The answers; then one of the batch with changed bytes, on a connection of its own.

        A server may close a connection after an answer; the rest is sent over another.

        Raises:
            AssertionError: a request was not answered.
        """
        answers: list[Reply] = []
        while len(answers) < len(batch):
            left = batch[len(answers) :]
            found = await self._answered(left)
            assert found, f"no answer to {left[0][:2000]!r}"
            answers += found
        await self._send_noise(batch)
        return answers

    async def _answered(self, batch: list[bytes]) -> list[Reply]:
        answers: list[Reply] = []
        async with Connection(self._url) as connection:
            connection.writer.writelines(batch)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while len(answers) < len(batch):
                    answers.append(await connection.read())
        return answers

    async def _send_noise(self, batch: list[bytes]) -> None:
        async with Connection(self._url) as connection:
            changed = mutated(self._draw.choice(batch), self._draw.getrandbits(32))
            connection.writer.write(changed + self._draw.randbytes(20))
            with suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(connection.reader.read(100), NOISE_WAIT_S)
