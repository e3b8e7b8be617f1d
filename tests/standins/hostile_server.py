"""An inference server that answers as vLLM or SGLang do, until it is told to misbehave on a path.

    WIRE      what goes wrong with bytes: sizes, times, headers, the connection
    STATUS    error statuses
    TEXT      a body that is no reply at all
    REPLY     a reply whose numbers cannot be true

A behavior of WIRE, STATUS and TEXT is a function of the connection and of the body that would have
been right; one of REPLY is a function of the right reply. The server counts the bytes it has sent.
"""

import asyncio
import contextlib
import functools
import json
import math
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Write = Callable[[bytes], Awaitable[None]]
Behavior = Callable[[Write, bytes], Awaitable[None]]
LOGPROB = -0.5
FOREVER_S = 3600.0
MB = 2**20


@dataclass(frozen=True)
class Reply:
    """What a reply says, whichever library's form it has. `entry_ids` are the ids that SGLang
    repeats beside its log-probabilities."""

    token_ids: Any
    logprobs: Any
    spans: Any
    finish_reason: Any = "stop"
    entry_ids: Any = None

    def form(self, kind: str) -> dict[str, Any]:
        return self._vllm() if kind == "vllm" else self._sglang()

    def _vllm(self) -> dict[str, Any]:
        logprobs = self.logprobs
        if isinstance(logprobs, list):
            logprobs = {"content": [{"logprob": value} for value in logprobs]}
        choice = {
            "token_ids": self.token_ids,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "weight_versions": self.spans,
        }
        return {"choices": [choice]}

    def _sglang(self) -> dict[str, Any]:
        logprobs, ids = self.logprobs, self.entry_ids or self.token_ids
        if isinstance(logprobs, list):
            many = ids if isinstance(ids, list) else [3] * len(logprobs)
            many = [*many, *[3] * len(logprobs)]
            logprobs = [[value, many[i], None] for i, value in enumerate(logprobs)]
        meta = {
            "finish_reason": {"type": self.finish_reason},
            "output_token_logprobs": logprobs,
            # Of the probe, which asks for truncation with a single candidate.
            "output_token_sampling_logprobs": [0.0],
            "weight_versions": self.spans,
        }
        return {"output_ids": self.token_ids, "meta_info": meta}


def good_reply(label: str, num_tokens: int) -> Reply:
    ids = [3 + i for i in range(num_tokens)]
    spans = [{"version": label, "start": 0, "end": num_tokens}]
    return Reply(ids, [LOGPROB] * num_tokens, spans)


def head(status: int = 200, length: int | None = None, *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status} -", "content-type: application/json", *fields]
    lines += [] if length is None else [f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def huge_body(write: Write, body: bytes) -> None:
    await write(head(200, 2**40))
    for _ in range(2**20):
        await write(b" " * MB)


async def huge_chunked_body(write: Write, body: bytes) -> None:
    await write(head(200, None, "transfer-encoding: chunked"))
    for _ in range(2**20):
        await write(b"100000\r\n" + b" " * MB + b"\r\n")


async def body_until_close(write: Write, body: bytes) -> None:
    await write(head())
    for _ in range(2**20):
        await write(b" " * MB)


@functools.cache
def bomb() -> bytes:
    """128 MB of blanks, packed to 128 KB."""
    packing = zlib.compressobj(1, zlib.DEFLATED, 31)
    return b"".join(packing.compress(b" " * MB) for _ in range(128)) + packing.flush()


async def compressed_bomb(write: Write, body: bytes) -> None:
    packed = bomb()
    await write(head(200, len(packed), "content-encoding: gzip") + packed)


async def huge_error(write: Write, body: bytes) -> None:
    await write(head(500, 2**40))
    for _ in range(2**20):
        await write(b"x" * MB)


async def endless_headers(write: Write, body: bytes) -> None:
    await write(b"HTTP/1.1 200 OK\r\n")
    for number in range(2**24):
        await write(f"x-{number}: {'y' * 1000}\r\n".encode())


async def byte_by_byte(write: Write, body: bytes) -> None:
    await write(head(200, 2**20))
    while True:
        await write(b" ")
        await asyncio.sleep(0.02)


async def headers_byte_by_byte(write: Write, body: bytes) -> None:
    await write(b"HTTP/1.1 200 OK\r\nx-header: ")
    while True:
        await write(b"x")
        await asyncio.sleep(0.02)


async def continues_forever(write: Write, body: bytes) -> None:
    while True:
        await write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.02)


async def silence(write: Write, body: bytes) -> None:
    await asyncio.sleep(FOREVER_S)


async def silence_after_headers(write: Write, body: bytes) -> None:
    await write(head(200, len(body)))
    await asyncio.sleep(FOREVER_S)


async def truncated(write: Write, body: bytes) -> None:
    await write(head(200, len(body)) + body[: len(body) // 2])


async def truncated_chunk(write: Write, body: bytes) -> None:
    await write(head(200, None, "transfer-encoding: chunked") + b"400\r\n" + body[:10])


async def bad_chunk_size(write: Write, body: bytes) -> None:
    await write(
        head(200, None, "transfer-encoding: chunked") + b"zzz\r\n" + body + b"\r\n0\r\n\r\n"
    )


async def closed_at_once(write: Write, body: bytes) -> None: ...


async def garbage(write: Write, body: bytes) -> None:
    await write(bytes(range(256)) * 16)


async def not_http(write: Write, body: bytes) -> None:
    await write(b"SSH-2.0-OpenSSH_9.6\r\n")


async def negative_length(write: Write, body: bytes) -> None:
    await write(head(200, -5) + body)


async def two_lengths(write: Write, body: bytes) -> None:
    await write(head(200, len(body), "content-length: 3") + body)


def status(number: int, *fields: str, text: bytes = b'{"error": {"message": "no"}}') -> Behavior:
    async def answer(write: Write, body: bytes) -> None:
        await write(head(number, len(text), *fields) + text)

    return answer


def text(content: bytes, *fields: str) -> Behavior:
    async def answer(write: Write, body: bytes) -> None:
        await write(head(200, len(content), *fields) + content)

    return answer


def edited(edit: Callable[[Any], Any]) -> Behavior:
    """The right body with a change to its JSON."""

    async def answer(write: Write, body: bytes) -> None:
        content = json.dumps(edit(json.loads(body))).encode()
        await write(head(200, len(content)) + content)

    return answer


def without(name: str) -> Callable[[Any], Any]:
    """Leaves a field out, wherever it is."""

    def edit(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: edit(inner) for key, inner in value.items() if key != name}
        return [edit(inner) for inner in value] if isinstance(value, list) else value

    return edit


DEEP = b"[" * 100_000
WIRE: Mapping[str, Behavior] = {
    "huge body": huge_body,
    "huge chunked body": huge_chunked_body,
    "body until close": body_until_close,
    "compressed bomb": compressed_bomb,
    "huge error": huge_error,
    "endless headers": endless_headers,
    "byte by byte": byte_by_byte,
    "headers byte by byte": headers_byte_by_byte,
    "continues forever": continues_forever,
    "silence": silence,
    "silence after headers": silence_after_headers,
    "truncated": truncated,
    "truncated chunk": truncated_chunk,
    "bad chunk size": bad_chunk_size,
    "closed at once": closed_at_once,
    "garbage": garbage,
    "not http": not_http,
    "negative length": negative_length,
    "two lengths": two_lengths,
}
STATUS: Mapping[str, Behavior] = {
    "500": status(500),
    "500 with a page": status(500, text=b"<html>Internal Server Error</html>"),
    "500 nested deeply": status(500, text=DEEP + b"]" * 100_000),
    "400 of other bytes": status(400, text=bytes(range(256))),
    "401": status(401),
    "404": status(404),
    "429": status(429, "retry-after: 0"),
    "429 for a year": status(429, "retry-after: 31536000"),
    "429 of nonsense": status(429, "retry-after: soon"),
    "503": status(503),
    "redirect": status(302, "location: http://127.0.0.1:1/elsewhere"),
    "redirect to itself": status(307, "location: /generate"),
    "204": status(204, text=b""),
    "an unknown status": status(799),
}
TEXT: Mapping[str, Behavior] = {
    "empty body": text(b""),
    "a page": text(b"<html>Welcome</html>", "x-content: html"),
    "other bytes": text(b"\xff\xfe\x00{"),
    "other charset": text('{"choices": []}'.encode("utf-16"), "x-charset: utf-16"),
    "null": text(b"null"),
    "a number": text(b"7"),
    "a list": text(b"[]"),
    "an empty object": text(b"{}"),
    "half of an object": text(b'{"choices": [{"token_ids": [1,'),
    "nested deeply": text(DEEP),
    "nested deeply and closed": text(b'{"x": ' + DEEP + b"]" * 100_000 + b"}"),
    "NaN": edited(lambda body: json.loads(json.dumps(body).replace("-0.5", "NaN"))),
    "no choices": edited(lambda body: {**body, "choices": [], "output_ids": None}),
    "no ids": edited(lambda body: without("token_ids")(without("output_ids")(body))),
    "no reason": edited(without("finish_reason")),
    "no spans": edited(without("weight_versions")),
    "no log-probabilities": edited(
        lambda body: without("logprobs")(without("output_token_logprobs")(body))
    ),
}


def of_all(**changes: Any) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, **changes)


def _spans(*spans: tuple[Any, Any, Any]) -> Callable[[Reply], Reply]:
    """Spans of the right owner: version, start, end."""

    def change(reply: Reply) -> Reply:
        owner = reply.spans[0]["version"].partition("/")[0]
        made = [{"version": f"{owner}/{v}", "start": a, "end": b} for v, a, b in spans]
        return replace(reply, spans=made)

    return change


def _owned(version: str) -> Callable[[Reply], Reply]:
    def change(reply: Reply) -> Reply:
        owner = reply.spans[0]["version"].partition("/")[0]
        return replace(reply, spans=[{**reply.spans[0], "version": f"{owner}/{version}"}])

    return change


REPLY: Mapping[str, Callable[[Reply], Reply]] = {
    "id beyond the vocabulary": of_all(token_ids=[3, 10_000_000]),
    "id of the vocabulary's size": of_all(token_ids=[3, 40]),
    "negative id": of_all(token_ids=[3, -1]),
    "id beyond 32 bits": of_all(token_ids=[3, 2**40]),
    "id beyond 64 bits": of_all(token_ids=[3, 2**80]),
    "id that is text": of_all(token_ids=[3, "4"]),
    "id that is a fraction": of_all(token_ids=[3, 4.5]),
    "id that is true": of_all(token_ids=[3, True]),
    "ids that are an object": of_all(token_ids={"0": 3}),
    "more tokens than asked": lambda r: good_reply(r.spans[0]["version"], 9),
    "many more tokens than asked": lambda r: good_reply(r.spans[0]["version"], 20_000),
    "fewer log-probabilities": of_all(logprobs=[LOGPROB]),
    "more log-probabilities": of_all(logprobs=[LOGPROB] * 3),
    "no log-probability": of_all(logprobs=[]),
    "positive log-probability": of_all(logprobs=[LOGPROB, 0.7]),
    "infinite log-probability": of_all(logprobs=[LOGPROB, 1e300]),
    "log-probability of minus infinity": of_all(logprobs=[LOGPROB, -1e300]),
    "log-probability of nothing": of_all(logprobs=[LOGPROB, -1e30]),
    "log-probability that is null": of_all(logprobs=[LOGPROB, None]),
    "log-probability that is text": of_all(logprobs=[LOGPROB, "-0.5"]),
    "log-probabilities that are text": of_all(logprobs="-0.5"),
    "a reason of ours": of_all(finish_reason="deadline"),
    "an unknown reason": of_all(finish_reason="tired"),
    "a reason that is null": of_all(finish_reason=None),
    "a version to come": _owned("7"),
    "a version beyond 64 bits": _owned("9" * 30),
    "a version in other digits": _owned("²"),
    "a negative version": _owned("-1"),
    "a version of somebody else": of_all(spans=[{"version": "other/0", "start": 0, "end": 2}]),
    "no span": of_all(spans=[]),
    "a span too short": _spans((0, 0, 1)),
    "a span from before the start": _spans((0, -2, 2)),
    "a span that ends before it starts": _spans((0, 0, 2), (0, 2, 1)),
    "spans over each other": _spans((0, 0, 2), (0, 1, 2)),
    "a span beyond 64 bits": _spans((0, 0, 2**70)),
}
OK: Mapping[str, Any] = {
    "/get_world_size": {"world_size": 1},
    "/v1/models": {"data": [{"id": "model", "max_model_len": 4000}]},
    "/server_info": {"tp_size": 1, "enable_deterministic_inference": False, "enable_metrics": True},
    "/metrics": "vllm:num_requests_running 1.0\nsglang:num_running_reqs 1.0\n",
}
GENERATE = ("/inference/v1/generate", "/generate")


@dataclass
class HostileServer:
    """`misbehave` is for the next requests of a path, so many or all until `behave()`."""

    kind: str
    port: int = 0
    label: str = "default"
    num_bytes: int = 0
    num_requests: int = 0
    num_pages: int = 0
    num_tokens: int = 2
    behaviors: dict[str, tuple[Behavior, float]] = field(default_factory=dict)
    reply: Callable[[Reply], Reply] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def misbehave(self, path: str, behavior: Behavior, times: float = math.inf) -> None:
        self.behaviors = {**self.behaviors, path: (behavior, times)}

    def _next(self, path: str) -> Behavior | None:
        behavior, times = self.behaviors.get(path, (None, 0.0))
        left = {name: value for name, value in self.behaviors.items() if name != path}
        if behavior and times > 1:
            left = {**left, path: (behavior, times - 1)}
        self.behaviors = left
        return behavior

    def behave(self) -> None:
        self.behaviors, self.reply = {}, None

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Waits for the next request; the connection's end unblocks."""

        async def write(content: bytes) -> None:
            writer.write(content)
            await writer.drain()
            self.num_bytes += len(content)

        gone = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*gone):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = lines[0].split(" ")[1].partition("?")[0]
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                sent = await reader.readexactly(int(fields.get("content-length", 0)))
                self.num_requests += path in GENERATE
                body = self._right(path, json.loads(sent) if sent else {})
                self.num_pages += path == "/metrics"
                if behavior := self._next(path):
                    await behavior(write, body)
                    break
                await write(head(200, len(body)) + body)
        writer.close()

    def _right(self, path: str, sent: Any) -> bytes:
        if path == "/update_weight_version":
            self.label = sent["new_version"]
        if path in ("/weight_info", "/model_info"):
            answer: Any = {"weight_version": self.label, "model_path": "m"}
        elif path in GENERATE:
            answer = self._reply(sent).form(self.kind)
        else:
            answer = OK.get(path, {})
        return (answer if isinstance(answer, str) else json.dumps(answer)).encode()

    def _reply(self, sent: Any) -> Reply:
        if sent["sampling_params"]["top_k"] == 1:
            return replace(good_reply(self.label, 1), logprobs=[0.0])
        reply = good_reply(self.label, self.num_tokens)
        return self.reply(reply) if self.reply else reply


@contextlib.contextmanager
def hostile_server(kind: str) -> Iterator[HostileServer]:
    """In a thread of its own, since an engine's start blocks its thread."""
    server, loop = HostileServer(kind), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.start_server(server.converse, "127.0.0.1", 0)
    listening = asyncio.run_coroutine_threadsafe(starting, loop).result()
    server.port = listening.sockets[0].getsockname()[1]

    async def end() -> None:
        listening.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop.stop()

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
        loop.close()
