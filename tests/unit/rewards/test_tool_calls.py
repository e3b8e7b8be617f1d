"""The reward `tool_calls`: calls of an episode against those of its row."""

import pytest

from actors.rewards.calls.limits import FinalError
from actors.rewards.tool_calls import tool_calls
from streamrl.interfaces import Episode, Prompt
from streamrl.types import FinishReason

GOLD = '[{"name": "add", "arguments": {"a": 1, "b": [2, null]}}]'


def episode(response: str, gold: str = GOLD, **values: object) -> Episode:
    return Episode(Prompt("?", gold), response, len(response), FinishReason.STOP, **values)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"name": "add", "parameters": {"b": [2.0, null], "a": 1}}', 1),
        ('{"type": "function", "function": {"name": "add", "arguments": "%s"}}', 0),
        ("[add(a=1, b=[2, None])]", 1),
        ("[add(a=1, b=[2, null])]", 1),
        ("[add(a=True, b=[2, None])]", 0),
        ("[add(1, [2, None])]", 0),
        ("[add(9, a=1, b=[2, None])]", 0),
        ("[add(a=1, b=[2, None], **{})]", 0),
        ("[add(a=1, b=[2, None]), add(a=1, b=[2, None])]", 0),
        ("[add(a=open('x'), b=[2, None])]", 0),
        (f"<tool_call>{GOLD}</tool_call>", 1),
        (f"<tool_call>{GOLD}", 1),
        (f"I call {GOLD}", 0),
        (f"I call:\n```json\n{GOLD}\n```\nIt adds them.", 1),
        (f"Not\n```json\n{GOLD}\n```\nbut\n```json\n[]\n```", 0),
        (f'{{"content": null, "tool_calls": {GOLD}}}', 1),
        ('<tool_call>{"name": "add"}</tool_call>', 0),
        ("[" * 100_000 + "]", 0),
        ("[add(" + "(" * 100_000 + ")]", 0),
    ],
)
def test_calls_count_by_their_values_however_they_are_written(response: str, reward: int):
    assert tool_calls(episode(response)).reward == reward


def test_arguments_may_hold_what_ends_a_call():
    text = "</tool_call> (a) ', b"
    gold = f'<tool_call>{{"name": "say", "arguments": {{"text": "{text}"}}}}</tool_call>'
    assert tool_calls(episode(f'[say(text="{text}")]', gold)).reward == 1
    assert tool_calls(episode(gold, gold)).reward == 1


def test_an_argument_may_hold_what_ends_a_block():
    gold = '[{"name": "say", "arguments": {"text": "``` is a fence"}}]'
    assert tool_calls(episode(f"So:\n```json\n{gold}\n```", gold)).reward == 1


def test_the_calls_that_were_read_are_shown():
    (read, nothing) = (tool_calls(episode(text)) for text in ("[add(b=2.0, a=1)]", "add 1 and 2"))
    assert (read.extracted, nothing.extracted) == ('["add", {"a": 1, "b": 2}]', "")


def test_calls_that_the_parser_has_read_count_of_all_turns_of_the_episode():
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
    shown = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = ({"role": "user", "content": "?"}, shown, {"role": "tool", "content": "3"})
    last = {"role": "assistant", "content": "It is 3."}
    assert tool_calls(episode("3", messages=(*turns, last), turn_rewards=(0.0, 0.0))).reward == 1
    # A call of the prompt is not the policy's.
    assert tool_calls(episode("3", messages=(*turns, last), turn_rewards=(0.0,))).reward == 0


@pytest.mark.parametrize("gold", ["", "none", "[]", "7", "[add("])
def test_an_answer_without_calls_is_no_gold(gold: str):
    with pytest.raises(FinalError, match="tool_calls needs calls of tools"):
        tool_calls(episode("", gold))
