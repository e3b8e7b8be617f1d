"""Requests that no client of an API sends are refused with a sentence, never with an internal
error; `tests/fuzz/gateway_port.py` found them."""

import asyncio
import json
from typing import Any

import pytest

from actors.gateway.gateway import Gateway
from actors.gateway.server import server_log
from tests.contract.test_agent_apis import QUESTION, Played, config, playing
from tests.unit.gateway.parts import PlainRenderer, client

HALF_OF_A_PAIR = b'"\\ud800"'


async def asked(played: Played, path: str, body: bytes) -> tuple[int, Any]:
    headers = {
        "Authorization": f"Bearer {played.task['api_key']}",
        "Content-Type": "application/json",
    }
    async with client() as http:
        url = played.task["anthropic_base_url"]
        answer = await http.post(f"{url}{path}", content=body, headers=headers)
        return answer.status_code, answer.json()


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": [QUESTION], **more}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions", b'{"agent": %s}' % HALF_OF_A_PAIR),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/responses", b'{"input": %s}'),
        ("/v1/responses", b'{"input": "\xff"}'),
        ("/v1/messages", b'{"max_tokens": 1, "messages": [], "system": %s}'),
    ],
)
async def test_what_is_no_text_is_no_json(path, body):
    async with playing("a;") as played:
        status, answer = await asked(played, path, body.replace(b"%s", HALF_OF_A_PAIR))
        assert status == 400
        assert answer["error"]["message"].startswith("the body is no JSON")


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 100_000])
async def test_arguments_that_no_reader_of_json_takes_stay_text(arguments):
    call = {"function": {"name": "add", "arguments": arguments}, "id": "c"}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, QUESTION]
    async with playing("a;") as played:
        played.session.renderer.encode_messages = lambda messages, tools: (1, 2)  # type: ignore[method-assign]
        status, answer = await asked(played, "/v1/chat/completions", chat(messages=messages))
        assert status == 200, answer


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/count_tokens", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/models/policy", 404, "invalid_request_error"),
        ("POST", "/v1/embeddings", 404, "invalid_request_error"),
    ],
)
async def test_what_is_not_served_is_said_in_the_form_of_the_api(method, path, status, kind):
    async with playing("a;") as played, client() as http:
        answer = await http.request(method, played.task["anthropic_base_url"] + path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, kind)
        assert error["message"] == f"{method} {path} is not served"
        assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_body_in_an_encoding_that_it_has_not_is_refused_and_logged_in_a_line(caplog):
    async with playing("a;") as played, client() as http:
        url = played.task["session_url"] + "/v1/chat/completions"
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = await http.post(url, content=b"{}", headers=headers)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == "the body cannot be read as Content-Encoding 'gzip'"
    assert not any(record.exc_info for record in caplog.records)


async def test_a_tool_has_a_name():
    async with playing("a;") as played:
        body = chat(tools=[{"type": "function", "function": {"description": "adds"}}])
        status, answer = await asked(played, "/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["message"] == "tools: has a function without a name"


CALL, OUTPUT = {"type": "function_call"}, {"type": "function_call_output"}
USE, RESULT = {"type": "tool_use"}, {"type": "tool_result"}


@pytest.mark.parametrize(
    ("path", "item", "sentence"),
    [
        ("/v1/responses", {**CALL, "name": "a", "call_id": []}, "got `array` - at `call_id`"),
        ("/v1/responses", {**CALL, "name": 5}, "`str`, got `int` - at `name`"),
        ("/v1/responses", {**CALL, "call_id": "c"}, "missing required field `name`"),
        ("/v1/responses", {**OUTPUT, "call_id": {}}, "`str`, got `object` - at `call_id`"),
        ("/v1/messages", {**USE, "name": "a", "id": []}, "`str`, got `array` - at `id`"),
        ("/v1/messages", {**USE, "name": "a", "input": [1]}, "`object`, got `array` - at `input`"),
        ("/v1/messages", {**RESULT, "tool_use_id": {}}, "got `object` - at `tool_use_id`"),
    ],
)
async def test_calls_and_their_results_have_names_and_ids_of_text(path, item, sentence):
    body = {"input": [QUESTION, item]}
    if path == "/v1/messages":
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [item]}]}
    async with playing("a;") as played:
        status, answer = await asked(played, path, json.dumps(body).encode())
        assert status == 400
        assert sentence in answer["error"]["message"]


async def test_numbers_have_a_range():
    async with playing("a;", request_sampling="refuse") as played:
        for name in ("top_k", "max_tokens"):
            body = chat(**{name: 10**400})
            status, answer = await asked(played, "/v1/chat/completions", body)
            assert status == 400, answer
            assert name in answer["error"]["message"]


async def test_a_token_that_is_no_text_is_refused(monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    async with client() as http:
        gateway = Gateway(config(token_env="TOKEN"))
        url = await gateway.start(PlainRenderer())
        try:
            headers = [(b"Authorization", b"Bearer \xff\xfe")]
            answer = await http.post(f"{url}/sessions", json={}, headers=headers)
            assert answer.status_code == 401
        finally:
            await gateway.close()


async def test_what_is_no_http_is_logged_at_times_without_its_bytes(caplog):
    async with client() as http:
        gateway = Gateway(config())
        url = await gateway.start(PlainRenderer())
        try:
            for _ in range(3):
                key = "sk-secret"
                assert await answer_to(url, f"GET /sessions/{key}\x17 HTTP/1.1\r\n\r\n") == 400
            assert (await http.get(f"{url}/sessions")).status_code == 405
        finally:
            await gateway.close()
    (record,) = (r for r in caplog.records if r.name == server_log().name)
    assert record.getMessage() == (
        "refused a request that is no HTTP: Invalid char in url path (1 so far)"
    )
    assert record.levelname == "WARNING"
    assert not record.exc_info


def test_a_failure_of_the_gateway_itself_is_logged_whole(caplog):
    log = server_log()
    try:
        raise ValueError("of ours")
    except ValueError:
        log.exception("a request failed")
    (record,) = (r for r in caplog.records if r.name == log.name)
    assert record.exc_info
    assert "of ours" in caplog.text


async def answer_to(url: str, request: str) -> int:
    """The status of bytes that no client of HTTP sends."""
    _, host, port = url.replace("//", "").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    status = await reader.readline()
    writer.close()
    return int(status.split()[1])
