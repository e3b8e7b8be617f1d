"""What a completion says: its content, its reasoning and its tool calls, by transformers' parser.

    hermes         <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Qwen2 to Qwen3, Hermes
    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE...: Qwen3-Coder, Qwen3.5, Seed-OSS
    glm            <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE...: GLM-4.5 and later
    minimax_m2     <invoke name="NAME"><parameter name="KEY">VALUE...: MiniMax-M2; with DSML in
                   front of each tag, DeepSeek-V3.2 and V4
    llama3         {"name": ..., "parameters": {...}} as the whole answer: Llama 3.1 to 3.3
    mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}]: Mistral to v7, Nemotron Nano 2,
                   Granite 3
    mistral_v11    [TOOL_CALLS]NAME[ARGS]{...}: Mistral from v11 on
    deepseek       <|tool_call_begin|>NAME<|tool_sep|>{...}: DeepSeek-V3 to V3.1
    kimi_k2        <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}: Kimi-K2
    gemma4         <|tool_call>call:NAME{...}<tool_call|>: Gemma 4
    cohere         <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]: Command R7B and A
    pythonic       <|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>: LFM2
    gpt_oss        to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>: gpt-oss

Each is a response template of `transformers.utils.chat_parsing`, with the content parsers below. If
a tokenizer has its own template, that one is used. A new convention is a template and a line in
`CONVENTIONS`.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from actors.rendering.chat_template import PROBED_TOOL, ChatTemplate, opened_thinking
from streamrl.errors import ConfigError, did_you_mean, read_text
from streamrl.interfaces import Message, ToolSchema

# Besides <think>, the marks of Gemma 4, of Magistral and Ministral, and of Seed-OSS.
_THINKING = {
    "open": ["<think>", "<|channel>thought\n", "[THINK]", "<seed:think>"],
    "close": ["</think>", "<channel|>", "[/THINK]", "</seed:think>"],
    "repeats": True,
    "join": "\n",
}
_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
_JSON_NAMES = {"true": "True", "false": "False", "null": "None"}
_REST = {"repeats": True, "join": "", "content_args": {"strip": False}}


def _template(calls: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template of a convention with these tool calls; the rest of a completion is content."""
    return {
        "start_anchor_pattern": r"\A",
        "fields": {
            "reasoning_content": _THINKING,
            "tool_calls": {"repeats": True, "content": "json", **calls},
            "content": _REST,
        },
    }


def _named(open_pattern: str, **region: Any) -> Mapping[str, Any]:
    """Calls with the name before the arguments."""
    transform = {"name": "{name}", "arguments": "{content}"}
    calls = {"open_pattern": open_pattern, **region}
    return _template({**calls, "transform": {"type": "function", "function": transform}})


def _marked(
    calls: Mapping[str, Any], thoughts: Mapping[str, Any], answers: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A convention that also marks thoughts and answers."""
    own = {"reasoning_content": {**_THINKING, **thoughts}, "content": {**answers, **_REST}}
    return {**calls, "fields": {**calls["fields"], **own}}


def _listed(name: str, arguments: str, **region: Any) -> Mapping[str, Any]:
    """Calls as one list of records with these keys."""
    transform = {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}
    call = {"transform": {"type": "function", "function": transform}, "transform_each": True}
    return _template({**region, "repeats": False, **call})


def _tagged(open_pattern: str, close_pattern: str, argument: str) -> Mapping[str, Any]:
    """Calls with a tag for each argument; the pattern `argument` reads its `key` and `value`."""
    read = {"content": "tags", "content_args": {"tag_pattern": argument}}
    return _named(open_pattern, close_pattern=close_pattern, **read)


def _tags(text: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, one for each tag: JSON if the tag says that it is no string, else
    text."""
    arguments = {}
    for found in re.finditer(args["tag_pattern"], text, re.DOTALL):
        tag = found.groupdict()
        arguments[tag["key"]] = tag["value"]
        if tag.get("is_text") == "false":
            with suppress(ValueError, RecursionError):
                arguments[tag["key"]] = json.loads(tag["value"] or "")
    return arguments


def _gemma(text: str, args: dict[str, Any]) -> Any:
    """Gemma 4's JSON, which has its own string marks and may contain None for null."""
    written = re.sub(
        r'(<\|"\|>.*?<\|"\|>)|\bNone\b', lambda m: m[1] or "null", text, flags=re.DOTALL
    )
    return CONTENT_PARSERS["json"](written, args)


def _python_calls(text: str, _: Any) -> list[Mapping[str, Any]]:
    """Read a Python call with literal arguments, or a list of calls, as [{"name": ..., "arguments":
    {...}}].

    LFM2.5's template does not escape quotes and newlines in strings, and allows any argument name.
    So a string ends at the first quote after which an argument may end.

    Raises:
        ValueError: the text is something else.
    """
    try:
        tree = ast.parse(_PYTHON_PART.sub(_escaped, text.strip()), mode="eval").body
        return [_python_call(c) for c in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(f"the calls are none in Python: {error}") from error


_PYTHON_PART = re.compile(
    r"""(?P<quote>['"])(?P<body>(?:\\.|[^\\])*?)(?P=quote)(?=\s*[],)}:])"""
    r"""|(?P<name>\b\w+)(?=\s*=)|\b(?P<json>true|false|null)\b(?!\s*[(.])|['"]""",
    re.DOTALL,
)
_PYTHON_CHARACTER = re.compile(
    r"""\\(?:[\\'"bfnrt]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U000[\da-fA-F]{5})|[\\'"\n\r\0]"""
)


def _escaped(part: re.Match[str]) -> str:
    """Make a part valid Python: a string with its quotes, newlines and backslashes escaped, a name
    that is no keyword, a JSON constant as Python writes it.

    Raises:
        ValueError: a string has no end.
    """
    if part["name"]:
        return part["name"] + "_"
    if part["json"]:
        return _JSON_NAMES[part["json"]]
    if part["quote"] is None:
        raise ValueError("a string in the calls has no end")
    escaped = _PYTHON_CHARACTER.sub(
        lambda found: found[0] if len(found[0]) > 1 else f"\\x{ord(found[0]):02x}", part["body"]
    )
    return f"'{escaped}'"


def _python_call(tree: ast.expr) -> Mapping[str, Any]:
    if not isinstance(tree, ast.Call) or tree.args or None in [k.arg for k in tree.keywords]:
        raise ValueError("a tool call has the form NAME(KEY=VALUE)")
    arguments = {str(k.arg)[:-1]: ast.literal_eval(k.value) for k in tree.keywords}
    # Only JSON values: tuples become lists; sets and bytes raise.
    return {"name": ast.unparse(tree.func), "arguments": json.loads(json.dumps(arguments))}


_OWN_PARSERS: Mapping[str, Any] = {"python-calls": _python_calls, "tags": _tags, "gemma": _gemma}
CONTENT_PARSERS.update(_OWN_PARSERS)

CONVENTIONS: Mapping[str, Mapping[str, Any]] = {
    "hermes": _template(
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    "qwen3_coder": _tagged(
        r"<(?:seed:)?tool_call>\s*<function=(?P<name>[^>\n]+)>",
        r"</function>\s*</(?:seed:)?tool_call>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|\Z)",
    ),
    "glm": _tagged(
        r"<tool_call>\s*(?P<name>[^<{\s]+)",
        r"(?:</arg_value>|\G)\s*</tool_call>",
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|\Z)",
    ),
    "minimax_m2": _tagged(
        rf"(?:<(?:minimax:tool_call|{_DSML}function_calls)>\s*)?"
        rf"<(?:{_DSML})?invoke name=\"(?P<name>[^\"]+)\">",
        rf"(?:</(?:{_DSML})?parameter>|\G)\s*</(?:{_DSML})?invoke>"
        rf"(?:\s*</(?:minimax:tool_call|{_DSML}function_calls)>)?"
        # Of a parameter without an end, at the end of the text.
        rf"|\n?</(?:{_DSML})?invoke>(?:\s*</(?:minimax:tool_call|{_DSML}function_calls)>)?\s*\Z",
        rf"<(?:{_DSML})?parameter name=\"(?P<key>[^\"]+)\"(?: string=\"(?P<is_text>\w+)\")?>"
        rf"(?P<value>.*?)(?:</(?:{_DSML})?parameter>|\Z)",
    ),
    "llama3": _template(
        {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?"
            r"(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\")",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        }
    ),
    "mistral": _listed(
        *("name", "arguments"),
        open_pattern=r"\[TOOL_CALLS\]|<TOOLCALL>|<tool_calls>|<\|tool_call\|>|<tool_call>(?=\s*\[)",
        close=["</TOOLCALL>", "</tool_calls>"],
    ),
    "mistral_v11": _named(
        r"\[TOOL_CALLS\](?P<name>[^\[\{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])",
    ),
    "deepseek": _named(
        r"(?:<.tool▁calls▁begin.>\s*)?<.tool▁call▁begin.>(?:function<.tool▁sep.>)?"
        r"(?P<name>[^<\n]+)(?:<.tool▁sep.>|\n```json\n)",
        close_pattern=r"(?:\n```)?<.tool▁call▁end.>(?:\s*<.tool▁calls▁end.>)?",
    ),
    "kimi_k2": _named(
        r"(?:<\|tool_calls?_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[^<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        close_pattern=r"<\|tool_call_end\|>(?:\s*<\|tool_calls?_section_end\|>)?",
    ),
    "gemma4": _named(
        r"<\|tool_call>call:(?P<name>[^{]+)(?=\{)",
        close="<tool_call|>",
        content="gemma",
        content_args={"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
    ),
    "cohere": _marked(
        _listed("tool_name", "parameters", open="<|START_ACTION|>", close="<|END_ACTION|>"),
        {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    ),
    "pythonic": _listed(
        *("name", "arguments"),
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        content="python-calls",
    ),
    "gpt_oss": _marked(
        _named(
            r"(?:<\|channel\|>commentary)?\s*to=functions\.(?P<name>[\w.-]+)[^{]*<\|message\|>",
            close=["<|call|>", "<|end|>"],
        ),
        {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        {
            "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
            "close": ["<|return|>", "<|end|>"],
        },
    ),
}


class MessageParser:
    """The parser of one tokenizer and chat template; `choice` is `data.tool_parser`.

    Raises:
        ConfigError: it names no known convention, or a file that is no response template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate | None, choice: str
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._choice = choice
        self._named = None if choice == "auto" else _load(choice)
        self._end_ids = frozenset(tokenizer.all_special_ids)
        # Cached: a completion is decoded as a message and for its reward, and siblings may be
        # equal.
        self.decode = lru_cache(maxsize=256)(self._decoded)

    @cached_property
    def _template(self) -> ResponseTemplate | None:
        """The chosen template, else the tokenizer's own, else the first convention that reads calls
        as the chat template renders them."""
        if self._named is not None:
            return self._named
        if (own := getattr(self._tokenizer, "response_template", None)) is not None:
            return load_response_template(dict(own))
        known = map(load_response_template, map(dict, CONVENTIONS.values()))
        return next(filter(self._survives, known), None)

    def _survives(self, template: ResponseTemplate) -> bool:
        """Whether this template recovers the calls that the chat template has rendered."""
        if self._chat is None or (rendered := self._chat.rendered_calls) is None:
            return False
        ends = (self._chat.end_of_turn.strip(), *self._tokenizer.all_special_tokens)
        end = "|".join(re.escape(end) for end in ends if end)
        completion = re.sub(rf"(?:\s|{end})+\Z", "", rendered.completion)
        read = _parsed(completion, template, opened_thinking(rendered.opening), [PROBED_TOOL])
        calls = [call["function"] for call in rendered.calls]
        return [call["function"] for call in read.get("tool_calls", ())] == calls

    def require_tool_calls(self) -> None:
        """
        Raises:
            ConfigError: `parse` would find no tool calls.
        """
        if self._fault:
            raise ConfigError(
                f"data.tool_parser: was {self._choice}, {self._fault}; name what the model writes: "
                f"one of {', '.join(CONVENTIONS)}, or PATH.json"
            )

    @cached_property
    def _fault(self) -> str:
        """Why `parse` would find no tool calls; "" if it would find them."""
        has_calls = self._chat is not None and self._chat.rendered_calls is not None
        if self._template is None:
            unread = "and none reads a call as the chat template writes it"
            return unread if has_calls else "and the chat template writes no calls"
        if "tool_calls" not in self._template.fields:
            return "which reads no tool calls"
        if self._choice in CONVENTIONS and has_calls and not self._survives(self._template):
            return "which does not read a call as the chat template writes it"
        return ""

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> Message:
        """The assistant's message; see `Renderer.parse`. If the chat template opens a `<think>`
        before the completion, that part belongs to the message.

        Raises:
            ConfigError: there are tools, but calls of them would not be found.
        """
        if tools:
            self.require_tool_calls()
        text = self.decode(self.without_end(token_ids))
        if self._template is None:
            return {"role": "assistant", "content": text}
        opening = "" if self._chat is None else self._chat.generation_prompt
        # A tokenizer's own template finds the message in the prompt itself.
        is_own = self._template.start_anchor_re.pattern != r"\A"
        prefix = opening if is_own else opened_thinking(opening)
        if tools is None:
            return _thought(text, self._template, prefix)
        return _parsed(text, self._template, prefix, tools)

    def without_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens without special ones at the end; special tokens elsewhere may belong to a
        call."""
        length = len(token_ids)
        while length and token_ids[length - 1] in self._end_ids:
            length -= 1
        return tuple(token_ids[:length])

    def _decoded(self, token_ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _parsed(
    text: str, template: ResponseTemplate, prefix: str, tools: Sequence[ToolSchema]
) -> Message:
    calls = template.fields.get("tool_calls")
    try:
        parsed = parse_response(
            _without_tags(text, calls.open_re) if calls and calls.content == "json" else text,
            template,
            prefix=prefix,
            tools=[dict(tool) for tool in tools],
        )
        if reason := _fault_of(parsed):
            raise ValueError(reason)
    except (ValueError, KeyError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return {**_thought(text, template, prefix), "parse_error": reason}
    return _message(parsed)


def _thought(text: str, template: ResponseTemplate, prefix: str) -> Message:
    """A message whose calls are not read: its thoughts apart from the rest, or all of its text."""
    fields = {name: field for name, field in template.fields.items() if name != "tool_calls"}
    with suppress(ValueError, KeyError, RecursionError):
        message = _message(parse_response(text, replace(template, fields=fields), prefix=prefix))
        if thoughts := message.get("reasoning_content"):
            # Where answers have marks of their own, a call is no content.
            return {**message, "content": message["content"] or text.rpartition(thoughts)[2]}
    return {"role": "assistant", "content": text}


def _without_tags(text: str, opening: re.Pattern[str]) -> str:
    """Escape every < in the JSON of calls, so that no string in it ends a call."""
    parts, place = [], 0
    while found := opening.search(text, place):
        begin = len(text) - len(text[found.end() :].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            end = begin
        parts += [text[place:begin], text[begin:end].replace("<", r"\u003c")]
        if end == place:
            break
        place = end
    return "".join([*parts, text[place:]])


def _calls_of(parsed: Mapping[str, Any]) -> Sequence[Any]:
    calls = parsed.get("tool_calls") or []
    return calls if isinstance(calls, list) else [calls]


def _fault_of(parsed: Mapping[str, Any]) -> str:
    """Why a message's calls cannot be run; "" if they can."""
    return next(filter(None, map(_error_of, _calls_of(parsed))), "")


def _message(parsed: Mapping[str, Any]) -> Message:
    """The message in the form that chat templates read."""
    message = {"role": "assistant", "content": str(parsed.get("content") or "").strip()}
    if reasoning := parsed.get("reasoning_content") or parsed.get("thinking"):
        message |= {"reasoning_content": reasoning}
    calls = _calls_of(parsed)
    return {**message, "tool_calls": calls} if calls else message


def _error_of(call: Any) -> str:
    """Why a parsed call is invalid; "" if it is valid."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "a tool call has no name"
    if not isinstance(function.get("arguments"), dict):
        return f"the arguments of the call of {function['name']!r} are no JSON object"
    try:
        json.dumps(function, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeEncodeError as error:
        return f"the call of {function['name']!a} is no valid Unicode: {error.reason}"
    except ValueError:
        return f"the call of {function['name']!r} has a number that is none in JSON"
    return ""


def _load(choice: str) -> ResponseTemplate:
    """Load a response template by name, or from a file."""
    if not choice.endswith(".json"):
        if choice in CONVENTIONS:
            return load_response_template(dict(CONVENTIONS[choice]))
        hint = did_you_mean(choice, ("auto", *CONVENTIONS))
        raise ConfigError(f"data.tool_parser: was {choice!r}; PATH.json or {hint}")
    path = Path(choice)
    try:
        return load_response_template(json.loads(read_text(path, "data.tool_parser")))
    except ValueError as error:
        raise ConfigError(
            f"data.tool_parser: {path} is no response template of transformers: {error}"
        ) from error
