"""The reward `tool_calls`: whether an episode makes the calls of the row's answer, in any order.

    [{"name": NAME, "arguments": {...}}, ...]                xLAM; one alone, `parameters` (Llama)
                                                             and OpenAI's `function` as well
    <tool_call>{"name": ..., "arguments": {...}}</tool_call> Hermes, also as Python prints a record
    [NAME(KEY=VALUE, ...), ...]                              ToolACE

Calls that the chat template's parser found count as it read them; without any, the last turn is
read in the same forms as the answer. Invariant: nothing in a response is run; what cannot be read
is no call.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from actors.rewards.answers import answer_of
from actors.rewards.builtin import no_gold
from actors.rewards.code.encodings import blocks, decoded
from actors.rewards.forms import gold_of
from streamrl.interfaces import Episode, Prompt, Score

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"\s*,?\s*([^()\[\]{},'\"=]+?)\s*\(")
_IN_ARGUMENTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[()]", re.DOTALL)
# Constants as JSON writes them.
_CONSTANTS = {"true": True, "false": False, "null": None}


def tool_calls(episode: Episode) -> Score:
    """Whether the calls are the answer's: as many, of the same tools, with equal arguments."""
    made = sorted(_made(episode))
    return Score(float(calls_to_match(episode.prompt) == made), extracted=", ".join(made))


def calls_to_match(prompt: Prompt) -> list[str]:
    """The calls of the answer; a FinalError if it has none."""
    gold = gold_of(prompt)
    calls = sorted(_read(gold))
    if not calls:
        raise no_gold(prompt, gold, "tool_calls needs calls of tools")
    return calls


def _made(episode: Episode) -> list[str]:
    turns = [m for m in episode.messages if m.get("role") == "assistant"]
    own = turns[-(len(episode.turn_rewards) or 1) :]
    parsed = [call for turn in own for call in turn.get("tool_calls") or ()]
    return _read(parsed or answer_of(episode))


def _read(value: Any) -> list[str]:
    """Each call as a text; none if anything cannot be read."""
    try:
        return list(_calls(value))
    except (TypeError, ValueError, KeyError, SyntaxError, RecursionError, MemoryError):
        return []


def _calls(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        yield from _calls(value["tool_calls"])
    elif isinstance(value, Mapping):
        record = value.get("function", value)
        arguments = decoded(record.get("arguments", record.get("parameters", {})))
        yield _written(record["name"], arguments)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _calls(item)
    elif _OPENING in value:
        for part in value.split(_OPENING)[1:]:
            yield from _calls(part.rpartition(_CLOSING)[0] or part)
    else:
        text = value.strip()
        if not text.startswith(("[", "{")) and (fenced := blocks(text)):
            text = fenced[-1][1].strip()
        record = decoded(text)
        yield from _in_python(text) if isinstance(record, str) else _calls(record)


def _in_python(text: str) -> Iterator[str]:
    """Yield the calls of "[NAME(KEY=VALUE), ...]", where a name may have spaces."""
    if not text.startswith("[") or not text.endswith("]"):
        return
    inner, place = text[1:-1], 0
    while inner[place:].strip():
        name = _NAME.match(inner, place)
        if name is None:
            raise ValueError(inner[place:])
        end = _end(inner, name.end())
        call = ast.parse(f"f({inner[name.end() : end]})", mode="eval").body
        assert isinstance(call, ast.Call), "it is written as one"
        if call.args or any(key.arg is None for key in call.keywords):
            raise ValueError(ast.unparse(call))
        values = (_Constants().visit(key.value) for key in call.keywords)
        names = (str(key.arg) for key in call.keywords)
        yield _written(name[1], dict(zip(names, map(ast.literal_eval, values), strict=True)))
        place = end + 1


def _end(text: str, start: int) -> int:
    """Where the bracket that was opened before `start` is closed."""
    depth = 1
    for found in _IN_ARGUMENTS.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    raise ValueError(text[start:])


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_CONSTANTS[node.id])


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, _plain(dict(arguments))], sort_keys=True)


def _plain(value: Any) -> Any:
    """A value for comparing: a whole number is the same as int and as float."""
    match value:
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [*map(_plain, value)]
        case float() if value.is_integer():
            return int(value)
    return value
