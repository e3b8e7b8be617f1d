"""The gateway answers the real clients of OpenAI and Anthropic as those services do."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anthropic
import openai
import pytest

from actors.gateway.agent import AgentResult
from actors.gateway.gateway import Gateway
from actors.gateway.session import Session
from streamrl.config import RunConfig
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext, Prompt
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine, client, text

QUESTION = {"role": "user", "content": "q"}
ADD = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
}
CHAT_TOOLS = [{"type": "function", "function": ADD}]
ANTHROPIC_TOOLS = [{"name": "add", "description": "adds", "input_schema": ADD["parameters"]}]


class Played:
    """One episode that waits for this test's calls."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, prompt: Prompt) -> None:
        self.engine = engine
        self.session = Session(engine, PlainRenderer(), SAMPLING, max_model_len=200)
        self._gateway = gateway
        self._context = EnvironmentContext(prompt, (), PlainRenderer(), seed=7, episode_index=1)
        self.task: dict[str, str] = {}
        self._clients = AsyncExitStack()

    async def start(self, task: dict[str, str]) -> None:
        self.task = task
        self.openai = await self.openai_client(task["base_url"], task["api_key"])
        self.anthropic = await self.anthropic_client(task["api_key"])

    async def openai_client(self, url: str, key: str) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=url, api_key=key)
        return await self._clients.enter_async_context(client)

    async def anthropic_client(self, key: str) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(base_url=self.task["anthropic_base_url"], api_key=key)
        return await self._clients.enter_async_context(client)

    async def close(self) -> None:
        await self._clients.aclose()

    @property
    def recorded(self) -> list[str]:
        return [text(segment.token_ids) for segment in self.session.record.segments]

    async def play(self) -> AgentResult:
        return await self._gateway.play(self.session, self._context)


def config(**agent: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "policy"},
            "data": {"source": "copy"},
            "generator": {"environment": "agent", "agent": agent},
        }
    )


@asynccontextmanager
async def playing(*answers: str, **agent: object) -> AsyncIterator[Played]:
    """An episode that an agent has asked for."""
    gateway = Gateway(config(**agent))
    url = await gateway.start(PlainRenderer())
    prompt = Prompt("what?", "42", {"id": 5}, environment="agent")
    played = Played(gateway, ScriptedEngine(*answers), prompt)
    running = asyncio.create_task(played.play())
    try:
        async with client() as http:
            response = await http.post(f"{url}/sessions", json={"wait_s": 60})
        await played.start(response.json())
        yield played
    finally:
        await played.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await gateway.close()


async def test_a_task_says_what_to_do_and_where():
    async with playing() as played:
        task = played.task
        assert task["messages"] == [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "what?"},
        ]
        assert (task["row"], task["answer"]) == ({"id": 5}, "42")
        assert (task["seed"], task["episode_index"], task["model"]) == (7, 1, "policy")
        async with client() as http:
            assert (await http.get(task["session_url"])).json() == task


class TestChatCompletions:
    async def test_a_conversation(self):
        async with playing("a;", "bb;") as played:
            first = await played.openai.chat.completions.create(model="m", messages=[QUESTION])
            assert first.choices[0].message.content == "a"
            assert first.choices[0].finish_reason == "stop"
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 2)
            assert first.model == "m"
            messages = [QUESTION, first.choices[0].message, {"role": "user", "content": "r"}]
            await played.openai.chat.completions.create(model="m", messages=messages)
            assert played.recorded == ["u:q;>a;u:r;>bb;"]

    async def test_tools(self):
        async with playing("t|add(1);", "2;") as played:
            chat = played.openai.chat.completions
            first = (await chat.create(model="m", messages=[QUESTION], tools=CHAT_TOOLS)).choices[0]
            assert (first.finish_reason, first.message.content) == ("tool_calls", None)
            (call,) = first.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": "1"})
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            messages = [QUESTION, first.message, result]
            await chat.create(model="m", messages=messages, tools=CHAT_TOOLS, tool_choice="auto")
            assert played.recorded == ["<add>u:q;>t|add(1);t:2;>2;"]

    async def test_a_null_that_the_policy_wrote_stays(self):
        async with playing("add(null);") as played:
            chat = played.openai.chat.completions
            (first,) = (await chat.create(model="m", messages=[QUESTION], tools=CHAT_TOOLS)).choices
            assert first.message.tool_calls[0].function.arguments == '{"x":null}'

    async def test_a_stream(self):
        async with playing("t|add(1);", "whole;") as played:
            chat = played.openai.chat.completions
            options = {"include_usage": True}
            stream = await chat.create(
                model="m",
                messages=[QUESTION],
                tools=CHAT_TOOLS,
                stream=True,
                stream_options=options,
            )
            chunks = [chunk async for chunk in stream]
            calls = [c for chunk in chunks for x in chunk.choices for c in x.delta.tool_calls or ()]
            assert [json.loads(call.function.arguments) for call in calls] == [{"x": "1"}]
            assert [x.finish_reason for c in chunks for x in c.choices][-1] == "tool_calls"
            assert chunks[-1].usage.completion_tokens == 9
            async with chat.stream(model="m", messages=[QUESTION]) as events:
                whole = await events.get_final_completion()
            assert whole.choices[0].message.content == "whole"
            assert whole.choices[0].finish_reason == "stop"

    async def test_logprobs_are_those_that_are_recorded(self):
        async with playing("a;") as played:
            answer = await played.openai.chat.completions.create(
                model="m", messages=[QUESTION], logprobs=True
            )
            content = answer.choices[0].logprobs.content
            assert [(entry.token, entry.logprob) for entry in content] == [("a", -9), ("", -8)]
            assert [entry.bytes for entry in content] == [[ord("a")], []]

    async def test_limits_and_sampling_of_a_request(self, caplog):
        async with playing("a;", "b;") as played:
            chat = played.openai.chat.completions
            for temperature in (0.2, 0.3):
                await chat.create(
                    model="m", messages=[QUESTION], max_tokens=3, temperature=temperature, n=1
                )
            used = played.engine.samplings
            assert [(s.max_new_tokens, s.temperature) for s in used] == [(3, 1.0)] * 2
            warnings = [r.message for r in caplog.records if "temperature" in r.message]
            assert len(warnings) == 1
            assert "asks for temperature 0.2; all are sampled with generator" in warnings[0]


class TestResponses:
    async def test_a_conversation(self):
        async with playing("a;", "b;") as played:
            responses = played.openai.responses
            first = await responses.create(model="m", instructions="s", input="q")
            assert (first.output_text, first.status) == ("a", "completed")
            assert (first.usage.input_tokens, first.usage.output_tokens) == (9, 2)
            again = [QUESTION, *first.output, {"role": "user", "content": "r"}]
            await responses.create(model="m", instructions="s", input=again)
            assert played.recorded == ["s:s;u:q;>a;u:r;>b;"]

    async def test_tools_and_an_earlier_response_by_its_id(self):
        async with playing("add(1);", "2;") as played:
            responses, tools = played.openai.responses, [{"type": "function", **ADD}]
            first = await responses.create(model="m", input="q", tools=tools)
            (call,) = first.output
            assert (call.name, json.loads(call.arguments)) == ("add", {"x": "1"})
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            second = await responses.create(
                model="m", input=[result], tools=tools, previous_response_id=first.id
            )
            assert second.output_text == "2"
            assert played.recorded == ["<add>u:q;>add(1);t:2;>2;"]

    async def test_a_later_response_goes_on_without_the_instructions_of_the_first(self):
        async with playing("a;", "b;", "c;") as played:
            responses = played.openai.responses
            opening = [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]
            first = await responses.create(model="m", input=opening)
            await responses.create(model="m", input="r", previous_response_id=first.id)
            assert played.recorded == ["s:s;u:q;>a;u:r;>b;"]
        async with playing("a;", "b;") as played:
            responses = played.openai.responses
            first = await responses.create(model="m", input="q", instructions="i")
            await responses.create(model="m", input="r", previous_response_id=first.id)
            assert played.recorded == ["s:i;u:q;>a;", "u:q;a:a;u:r;>b;"]

    async def test_a_stream(self):
        async with playing("a;", "add(1)") as played:
            tools = [{"type": "function", **ADD}]
            async with played.openai.responses.stream(model="m", input="q") as stream:
                deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                assert "".join(deltas) == "a"
                assert (await stream.get_final_response()).output_text == "a"
            stream = await played.openai.responses.create(
                model="m", input="q", tools=tools, stream=True
            )
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].type == "response.incomplete"
            assert events[-1].response.output[0].arguments == '{"x":"1"}'


class TestMessages:
    async def test_a_conversation(self):
        async with playing("a;", "b;") as played:
            create = played.anthropic.messages.create
            first = await create(model="m", max_tokens=4, system="s", messages=[QUESTION])
            assert (first.content[0].text, first.stop_reason) == ("a", "end_turn")
            assert (first.usage.input_tokens, first.usage.output_tokens) == (9, 2)
            answer = {"role": "assistant", "content": first.content}
            messages = [QUESTION, answer, {"role": "user", "content": "r"}]
            await create(model="m", max_tokens=4, system="s", messages=messages)
            assert played.recorded == ["s:s;u:q;>a;u:r;>b;"]
            assert {s.max_new_tokens for s in played.engine.samplings} == {4}

    async def test_tools(self):
        async with playing("add(1);", "2;") as played:
            messages = played.anthropic.messages
            first = await messages.create(
                model="m", max_tokens=9, messages=[QUESTION], tools=ANTHROPIC_TOOLS
            )
            (call,) = first.content
            assert (first.stop_reason, call.name, call.input) == ("tool_use", "add", {"x": "1"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            said = [QUESTION, {"role": "assistant", "content": first.content}]
            said = [*said, {"role": "user", "content": [result, {"type": "text", "text": "go"}]}]
            await messages.create(model="m", max_tokens=9, messages=said, tools=ANTHROPIC_TOOLS)
            assert played.recorded == ["<add>u:q;>add(1);t:2;u:go;>2;"]

    async def test_a_null_that_the_policy_wrote_stays(self):
        async with playing("add(null);", "2;") as played:
            asked = {"model": "m", "max_tokens": 9, "tools": ANTHROPIC_TOOLS}
            first = await played.anthropic.messages.create(messages=[QUESTION], **asked)
            (call,) = first.content
            assert call.input == {"x": None}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            said = [QUESTION, {"role": "assistant", "content": first.content}]
            said = [*said, {"role": "user", "content": [result]}]
            await played.anthropic.messages.create(messages=said, **asked)
            assert played.recorded == ["<add>u:q;>add(null);t:2;>2;"]

    async def test_an_answer_without_content_goes_on(self):
        async with playing("t|;", "b;") as played:
            create = played.anthropic.messages.create
            await create(model="m", max_tokens=4, messages=[QUESTION])
            # What is left of it without its empty text.
            messages = [QUESTION, {"role": "assistant", "content": []}, QUESTION]
            await create(model="m", max_tokens=4, messages=messages)
            assert played.recorded == ["u:q;>t|;u:q;>b;"]

    async def test_what_claude_code_sends_is_taken(self):
        async with playing("a;", "b;") as played:
            messages = [QUESTION]
            for nonce in ("1f", "2e"):
                account = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
                answer = await played.anthropic.beta.messages.create(
                    model="m",
                    max_tokens=4,
                    system=[{"type": "text", "text": text} for text in (account, "s")],
                    messages=messages,
                    context_management={"edits": []},
                    output_config={"effort": "high"},
                )
                said = {"role": "assistant", "content": answer.content}
                messages = [*messages, said, {"role": "user", "content": "r"}]
            assert played.recorded == ["s:s;u:q;>a;u:r;>b;"]

    async def test_what_claude_code_asks_again_for_is_refused_in_its_words(self):
        async with playing() as played:
            messages = [QUESTION, {"role": "system", "content": "s"}]
            with pytest.raises(anthropic.BadRequestError, match="role 'system' is not supported"):
                await played.anthropic.messages.create(model="m", max_tokens=4, messages=messages)

    async def test_the_loop_of_the_client_goes_on_without_threads(self):
        @anthropic.beta_async_tool
        async def add(x: str) -> str:
            """adds"""
            return f"{x}+"

        async with playing("add(1);", "2;") as played:
            runner = played.anthropic.beta.messages.tool_runner(
                model="m", max_tokens=9, messages=[QUESTION], tools=[add]
            )
            last = await runner.until_done()
            assert last.content[0].text == "2"
            assert played.recorded == ["<add>u:q;>add(1);t:1+;>2;"]

    async def test_a_stream(self):
        async with playing("a;", "add(1)") as played:
            messages = played.anthropic.messages
            async with messages.stream(model="m", max_tokens=9, messages=[QUESTION]) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == "a"
                assert (await stream.get_final_message()).usage.output_tokens == 2
            async with messages.stream(
                model="m", max_tokens=9, messages=[QUESTION], tools=ANTHROPIC_TOOLS
            ) as stream:
                whole = await stream.get_final_message()
            assert (whole.content[0].input, whole.stop_reason) == ({"x": "1"}, "max_tokens")


async def test_the_policy_is_listed():
    async with playing() as played:
        assert [model.id async for model in played.openai.models.list()] == ["policy"]
        assert [model.id async for model in played.anthropic.models.list()] == ["policy"]


async def test_the_key_may_stand_in_the_path():
    async with playing("a;") as played:
        client = await played.openai_client(f"{played.task['session_url']}/v1", "own")
        await client.chat.completions.create(model="m", messages=[QUESTION])
        assert played.recorded == ["u:q;>a;"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"n": 2}, "n: was 2, which is not supported; leave it out"),
        ({"extra_body": {"n": True}}, "n: was True, which is not supported"),
        ({"extra_body": {"presence_penalty": False}}, "presence_penalty: was False"),
        ({"stop": ["x"]}, "stop: was ['x']"),
        ({"tool_choice": "required", "tools": CHAT_TOOLS}, "tool_choice: was 'required'"),
        ({"response_format": {"type": "json_object"}}, "response_format: was"),
        ({"logit_bias": {"5": 1}}, "logit_bias: was"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: was 3"),
        ({"max_tokens": 0}, "max_tokens: was 0; it must be 1 or more"),
        ({"max_completion_tokens": 0, "max_tokens": 9}, "max_tokens: was 0; it must be 1"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role was 'robot'; allowed: system"),
        (
            {"messages": [QUESTION, {"role": "function", "name": "add", "content": "2"}]},
            "role was 'function'; allowed: system",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last one is the assistant's"),
        ({"extra_body": {"guided": 1}}, "unknown field `guided`"),
        ({"extra_body": {"messages": "x"}}, "Expected `array`, got `str`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "has a part of type 'image_url'; allowed: text",
        ),
        ({"messages": [{"role": "user", "content": "q" * 300}]}, "generator.max_model_len is 200"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(asked, sentence):
    async with playing("a;") as played:
        with pytest.raises(openai.BadRequestError) as refused:
            await played.openai.chat.completions.create(
                **{"model": "m", "messages": [QUESTION], **asked}
            )
        assert sentence in refused.value.message
        assert played.recorded == []


async def test_how_much_to_think_and_say_is_left_to_the_policy():
    async with playing("a;", "b;", "c;") as played:
        chat, messages = played.openai.chat.completions, played.anthropic.messages
        await chat.create(model="m", messages=[QUESTION], reasoning_effort="low", verbosity="low")
        asked = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
        await played.openai.responses.create(model="m", input="q", **asked)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        await messages.create(model="m", max_tokens=9, messages=[QUESTION], thinking=thinking)
        assert played.recorded == ["u:q;>a;", "u:q;>b;", "u:q;>c;"]


async def test_refusals_have_the_form_of_their_api():
    async with playing("a;") as played:
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as refused:
            await played.anthropic.messages.create(
                model="m", max_tokens=1, messages=[QUESTION], stop_sequences=["x"]
            )
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        long = "q" * 300
        with pytest.raises(openai.BadRequestError) as too_long:
            await played.openai.responses.create(model="m", input=long)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="is no response of this episode"):
            await played.openai.responses.create(
                model="m", input="q", previous_response_id="resp_x"
            )


async def test_other_sampling_may_be_refused():
    async with playing("a;", request_sampling="refuse") as played:
        with pytest.raises(openai.BadRequestError, match=r"temperature: was 0.5, and generator"):
            await played.openai.chat.completions.create(
                model="m", messages=[QUESTION], temperature=0.5
            )
        await played.openai.chat.completions.create(
            model="m", messages=[QUESTION], temperature=1.0, top_p=1.0
        )
        assert played.recorded == ["u:q;>a;"]


async def test_a_body_that_is_too_large_or_no_json_is_refused():
    async with (
        playing("a;", max_request_bytes=1000) as played,
        client() as http,
    ):
        url, key = f"{played.task['base_url']}/chat/completions", played.task["api_key"]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

        async def refused(content: bytes, **other: str) -> tuple[int, str]:
            answer = await http.post(url, content=content, headers={**headers, **other})
            return answer.status_code, answer.json()["error"]["message"]

        assert (await refused(b"x" * 2000))[0] == 413
        status, sentence = await refused(b"{")
        assert status == 400
        assert sentence.startswith("the body is no JSON")
        assert await refused(b"[1]") == (400, "the body is a list; it must be an object")
        status, _ = await refused(b"[" * 900)
        assert status == 400
        status, sentence = await refused(b"{}", **{"Content-Type": "text/plain"})
        assert (status, sentence) == (
            415,
            "Content-Type: was 'text/plain'; it must be application/json",
        )


async def test_another_key_is_refused_and_that_of_a_closed_episode_is_told_so():
    async with playing("a;") as played, client() as http:
        stranger = await played.openai_client(played.task["base_url"], "sk-other")
        with pytest.raises(openai.AuthenticationError, match="no episode has this API key"):
            await stranger.chat.completions.create(model="m", messages=[QUESTION])
        other = await played.anthropic_client("sk-other")
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model="m", max_tokens=1, messages=[QUESTION])
        await played.openai.chat.completions.create(model="m", messages=[QUESTION])
        reward = f"{played.task['session_url']}/reward"
        assert (await http.post(reward, json={"reward": 1})).status_code == 200
        with pytest.raises(openai.APIStatusError, match="the episode is over") as over:
            await played.openai.chat.completions.create(model="m", messages=[QUESTION])
        assert over.value.status_code == 410


async def test_an_engine_that_cannot_serve_a_request_says_so():
    class Failing(ScriptedEngine):
        async def generate(self, *arguments: object) -> object:
            raise RolloutError("out of blocks")

    async with playing() as played:
        played.session.engine = Failing()
        client = played.openai.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match="out of blocks"):
            await client.chat.completions.create(model="m", messages=[QUESTION])


async def test_a_client_that_goes_away_gives_its_slot_back():
    async with playing("a;") as played:
        played.engine.open.clear()
        client = played.openai.with_options(max_retries=0)
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))
        async with asyncio.timeout(120):
            while not played.engine.num_running:
                await asyncio.sleep(0.01)
            call.cancel()
            while played.engine.num_running:
                await asyncio.sleep(0.01)
        assert played.recorded == []
