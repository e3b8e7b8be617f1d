"""What an agent's calls record: the ids that the engine read and sampled, and nothing else."""

import asyncio
import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from actors.gateway.session import ContextTooLongError, Session, SessionEndedError
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine, text

QUESTION = {"role": "user", "content": "q"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def session(*answers: str, max_model_len: int = 200) -> tuple[Session, ScriptedEngine]:
    engine = ScriptedEngine(*answers)
    return Session(engine, PlainRenderer(), SAMPLING, max_model_len=max_model_len), engine


def segments(of: Session) -> list[str]:
    return [text(segment.token_ids) for segment in of.record.segments]


def sampled(of: Session) -> list[list[str]]:
    return [
        [text(span.token_ids) for span in segment.spans if span.policy_versions.max() >= 0]
        for segment in of.record.segments
    ]


async def test_messages_that_go_on_are_read_as_the_ids_that_were_sampled():
    policy, engine = session("why|a;", "b;")
    first = await policy.complete([QUESTION])
    assert first.message["reasoning_content"] == "why"
    assert (first.num_prompt_tokens, first.completion.finish_reason) == (5, "stop")
    # The client sends the answer back without the thoughts, and the template renders none.
    back = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "name": "me"}
    await policy.complete([QUESTION, back, {"role": "user", "content": "r"}])
    assert segments(policy) == ["u:q;>why|a;u:r;>b;"]
    assert [prompt for prompt, _ in engine.calls] == ["u:q;>", "u:q;>why|a;u:r;>"]
    assert sampled(policy) == [["why|a;", "b;"]]


async def test_a_completion_that_a_limit_cut_gets_the_end_of_its_turn_from_the_template():
    policy, _ = session("a", "b;")
    first = await policy.complete([QUESTION])
    await policy.complete([QUESTION, first.message, QUESTION])
    assert segments(policy) == ["u:q;>a;u:q;>b;"]
    assert sampled(policy) == [["a", "b;"]]


async def test_tool_calls_come_back_in_the_clients_form():
    policy, _ = session("t|add(1);", "2;")
    first = await policy.complete([QUESTION], TOOLS)
    assert first.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": "1"}}
    call = {"id": "x", "function": {"name": "add", "arguments": json.dumps({"x": "1"})}}
    back = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "2"}]}
    await policy.complete([QUESTION, back, result], TOOLS)
    assert segments(policy) == ["<add>u:q;>t|add(1);t:2;>2;"]
    assert [turn.num_tool_calls for turn in policy.record.segments[0].turns] == [1, 0]


async def test_calls_are_text_where_no_tools_were_offered():
    policy, _ = session("t|add(1);", "2;")
    first = await policy.complete([QUESTION])
    said = {"role": "assistant", "content": "add(1)", "reasoning_content": "t"}
    assert first.message == said
    await policy.complete([QUESTION, first.message, QUESTION])
    assert segments(policy) == ["u:q;>t|add(1);u:q;>2;"]
    assert [turn.num_tool_calls for turn in policy.record.segments[0].turns] == [0, 0]


async def test_results_have_the_names_of_their_tools_and_ids_that_templates_take():
    (policy, _), read = session("|add(1);", "done;"), []
    first = await policy.complete([QUESTION], TOOLS)
    (call,) = first.message["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"])
    encode_reply = policy.renderer.encode_reply
    policy.renderer.encode_reply = lambda *args: read.extend(args[0]) or encode_reply(*args)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    await policy.complete([QUESTION, first.message, result], TOOLS)
    assert read == [{"name": "add", **result}]


async def test_an_episode_of_many_calls_is_one_segment():
    answers = ["s|add(1);", "t|add(2);", "u|add(3);", "v|done;"]
    (policy, _), messages = session(*answers), [QUESTION]
    for _ in answers:
        said = dict((await policy.complete(messages, TOOLS)).message)
        calls = said.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "0"} for c in calls]
        # Clients send no thoughts back, and results without the names of their tools.
        said.pop("reasoning_content")
        messages = [*messages, said, *results]
    assert segments(policy) == ["<add>u:q;>s|add(1);t:0;>t|add(2);t:0;>u|add(3);t:0;>v|done;"]
    assert sampled(policy) == [answers]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([QUESTION, {"role": "assistant", "content": "A"}, QUESTION], []),
        ([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}, QUESTION], []),
        ([QUESTION, {"role": "assistant", "content": "a"}, QUESTION], TOOLS),
        ([{"role": "user", "content": "a summary"}], []),
        ([QUESTION], []),
    ],
)
async def test_messages_that_were_rewritten_are_a_segment_of_their_own(messages, tools):
    policy, _ = session("a;", "b;")
    await policy.complete([QUESTION])
    await policy.complete(messages, tools)
    rendered = text(PlainRenderer().encode_messages(messages, tools))
    assert segments(policy) == ["u:q;>a;", f"{rendered}b;"]
    assert sampled(policy) == [["a;"], ["b;"]]


async def test_a_branch_keeps_the_ids_of_its_beginning_and_samples_each_token_once():
    policy, _ = session("t|a;", "b;", "c;")
    first = (await policy.complete([QUESTION])).message
    for word in ("x", "y"):
        await policy.complete([QUESTION, first, {"role": "user", "content": word}])
    assert segments(policy) == ["u:q;>t|a;u:x;>b;", "u:q;>t|a;u:y;>c;"]
    assert sampled(policy) == [["t|a;", "b;"], ["c;"]]


async def test_calls_beside_each_other_are_recorded_each():
    policy, engine = session("a;", "b;", "c;")
    engine.open.clear()
    calls = [
        asyncio.create_task(policy.complete([{"role": "user", "content": word}]))
        for word in ("x", "y", "z")
    ]
    while engine.num_running < 3:
        await asyncio.sleep(0)
    assert policy.silent_s == 0
    engine.open.set()
    replies = await asyncio.gather(*calls)
    assert sorted(reply.message["content"] for reply in replies) == ["a", "b", "c"]
    recorded = [(prompt + answer) for prompt, answer in engine.calls]
    assert segments(policy) == recorded
    assert policy.record.num_sampled_tokens == 6


async def test_an_ended_session_samples_and_records_no_more():
    policy, engine = session("a;", "b;")
    await policy.complete([QUESTION])
    engine.open.clear()
    late = asyncio.create_task(policy.complete([{"role": "user", "content": "late"}]))
    while not engine.num_running:
        await asyncio.sleep(0)
    policy.end("the episode has its reward")
    engine.open.set()
    for call in (late, policy.complete([QUESTION])):
        with pytest.raises(SessionEndedError, match="has its reward"):
            await call
    assert segments(policy) == ["u:q;>a;"]


async def test_messages_that_fill_the_context_are_refused_and_the_session_goes_on():
    policy, _ = session("a;", max_model_len=10)
    with pytest.raises(ContextTooLongError, match=r"13 tokens.*max_model_len is 10"):
        await policy.complete([{"role": "user", "content": "q" * 9}])
    await policy.complete([QUESTION])
    assert segments(policy) == ["u:q;>a;"]


@given(st.lists(st.tuples(st.text("ab;", min_size=1), st.text("xyz")), min_size=1, max_size=9))
def test_a_conversation_of_any_length_is_one_segment_of_what_the_engine_saw(turns):
    async def run() -> None:
        policy, engine = session(*(answer for answer, _ in turns), max_model_len=10_000)
        messages = [QUESTION]
        for _, reply in turns:
            answer = (await policy.complete(messages)).message
            messages = [*messages, answer, {"role": "user", "content": reply}]
        assert segments(policy) == ["".join(engine.calls[-1])]
        assert sampled(policy) == [[answer for answer, _ in turns]]

    asyncio.run(run())
