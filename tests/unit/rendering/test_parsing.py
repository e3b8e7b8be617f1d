"""Completions of real template conventions become messages; none of them raises."""

import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.make_model import make_tokenizer
from actors.rendering.parsing import CONVENTIONS
from actors.rendering.renderer import ChatRenderer
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"


def template(family: str) -> str:
    """ChatML in which tools are called as in this family; "": in which calls are left out."""
    text = (FOLDER / "families.jinja").read_text(encoding="utf-8")
    return f"{{%- set family = '{family}' -%}}{text}"


CHATML = template("")
TEMPLATES = {name: template(name) for name in CONVENTIONS}
HERMES, CODER, LLAMA, MISTRAL = (
    TEMPLATES[name] for name in ("hermes", "qwen3_coder", "llama3", "mistral")
)
THINKS = HERMES.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


ASKED = {"role": "user", "content": "1+2?"}


def make(chat_template: str, tool_parser: str = "auto", **own: Any) -> ChatRenderer:
    tokenizer = characters()
    tokenizer.chat_template = chat_template
    for name, value in own.items():
        setattr(tokenizer, name, value)
    settings = DataSettings(source="reverse", tool_parser=tool_parser)
    return ChatRenderer(tokenizer, settings)


@cache
def renderers() -> list[ChatRenderer]:
    return [make(template) for template in TEMPLATES.values()]


def characters() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(string.printable + "▁\N{FULLWIDTH VERTICAL LINE}")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_end|>", "<|eot_id|>", "<|python_tag|>"]}
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level BPE", "SentencePiece", "characters"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind):
    """A token may be a part of a character, whose text alone is no character."""
    text = "na\u00efve \U0001f600"
    if kind == "byte-level BPE":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        own = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
    else:
        known = sorted({*text} - {"\u00ef", "\U0001f600"})
        vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), *known]
        places = {piece: i for i, piece in enumerate(vocabulary)}
        own = Tokenizer(models.BPE(places, [], byte_fallback=kind == "SentencePiece"))
        own.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own)
    renderer = ChatRenderer(tokenizer, DataSettings(source="reverse"))
    found = [renderer.bytes_of(token) for token in renderer.encode_text(text)]
    assert b"".join(found) == (text.encode() if kind != "characters" else b"nave ")
    assert kind == "characters" or any(len(one) == 1 and one[0] > 0x7F for one in found)


def parse(renderer: ChatRenderer, text: str) -> dict[str, Any]:
    return dict(renderer.parse(renderer.encode_text(text), [ADD]))


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class TestConventions:
    def test_text_alone_is_content(self) -> None:
        expected = {"role": "assistant", "content": "It is 4."}
        for name in TEMPLATES.keys() - {"gpt_oss", "cohere"}:
            assert parse(make(TEMPLATES[name]), "It is 4.<|im_end|>") == expected

    def test_hermes_calls_between_text(self) -> None:
        text = (
            'First.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
        )
        assert parse(make(HERMES), text) == {
            "role": "assistant",
            "content": "First.",
            "tool_calls": [call("add", a=1), call("add", a=2)],
        }

    def test_reasoning_that_the_completion_opens(self) -> None:
        message = parse(make(HERMES), "<think>\nHm.\n</think>\n\nFour.<|im_end|>")
        assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}

    @pytest.mark.parametrize(
        ("name", "thoughts", "said"),
        [
            ("hermes", "<think>Hm.</think>", '<tool_call>{"name": "add"}</tool_call>'),
            ("hermes", "", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
            ("cohere", "<|START_THINKING|>Hm.", "<|END_THINKING|><|START_ACTION|>[]"),
        ],
    )
    def test_calls_that_are_not_to_be_read_are_text_behind_the_thoughts(
        self, name: str, thoughts: str, said: str
    ) -> None:
        renderer = make(TEMPLATES[name])
        message = renderer.parse(renderer.encode_text(f"{thoughts}{said}<|im_end|>"), None)
        apart = {"reasoning_content": "Hm."} if thoughts else {}
        assert message == {"role": "assistant", "content": said, **apart}

    def test_reasoning_that_the_template_opens(self) -> None:
        message = parse(make(THINKS), "Hm.\n</think>\n\nFour.<|im_end|>")
        assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}

    @pytest.mark.parametrize(
        ("family", "begin", "end"),
        [
            ("mistral_v11", "[THINK]", "[/THINK]"),
            ("qwen3_coder", "<seed:think>", "</seed:think>"),
        ],
    )
    def test_reasoning_has_marks_of_the_family(self, family: str, begin: str, end: str) -> None:
        renderer = make(TEMPLATES[family])
        message = parse(renderer, f"{begin}Hm.{end}Four.")
        assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
        assert parse(renderer, f"{begin}Three?")["content"] == ""

    def test_a_call_that_the_reasoning_mentions_is_none(self) -> None:
        message = parse(make(THINKS), "<tool_call>? No.\n</think>\nFour.")
        assert "tool_calls" not in message
        assert message["content"] == "Four."

    def test_a_parameter_that_is_text_gets_the_type_of_its_schema(self) -> None:
        text = (
            "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n7\n"
            "</parameter>\n</function>\n</tool_call>"
        )
        assert parse(make(CODER), text)["tool_calls"] == [call("add", a=7, b="7")]

    def test_a_parameter_without_an_end_ends_with_its_call(self) -> None:
        text = "<tool_call><function=add><parameter=a>\n7\n</function></tool_call>"
        assert parse(make(CODER), text)["tool_calls"] == [call("add", a=7)]

    def test_an_argument_of_minimax_may_hold_what_ends_a_call(self) -> None:
        text = '<invoke name="add"><parameter name="b"></invoke></parameter>\n</invoke>'
        message = parse(make(TEMPLATES["minimax_m2"]), text)
        assert (message["content"], message["tool_calls"]) == ("", [call("add", b="</invoke>")])
        text = '<invoke name="add"><parameter name="b">x\n</invoke>\n</minimax:tool_call>'
        assert parse(make(TEMPLATES["minimax_m2"]), text)["tool_calls"] == [call("add", b="x")]

    @pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
    def test_llama(self, tag: str) -> None:
        message = parse(make(LLAMA), tag + '{"name": "add", "parameters": {"a": 1}}</s>')
        assert message == {"role": "assistant", "content": "", "tool_calls": [call("add", a=1)]}

    def test_llama_with_a_type_in_front(self) -> None:
        text = '{"type": "function", "name": "add", "parameters": {"a": 1}}<|eot_id|>'
        assert parse(make(LLAMA), text)["tool_calls"] == [call("add", a=1)]

    def test_llama_json_within_text_is_text(self) -> None:
        text = 'See {"name": "add", "parameters": {}}'
        assert parse(make(LLAMA), text) == {"role": "assistant", "content": text}

    def test_gpt_oss_has_channels(self) -> None:
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
        )
        message = parse(make(TEMPLATES["gpt_oss"]), text)
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"] == [call("add", a=1)]
        answer = parse(make(TEMPLATES["gpt_oss"]), "<|channel|>final<|message|>It is 4.<|return|>")
        assert answer == {"role": "assistant", "content": "It is 4."}

    @pytest.mark.parametrize(
        ("family", "text"),
        [
            (
                "deepseek",
                "Yes.<|tool▁calls▁begin|><|tool▁call▁begin|>add<|tool▁sep|>"
                '{"a": 1}<|tool▁call▁end|><|tool▁calls▁end|>',
            ),
            (
                "kimi_k2",
                "Yes.<|tool_call_section_begin|><|tool_call_begin|> functions.add:0"
                '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_section_end|>',
            ),
            (
                "kimi_k2",
                "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
                '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            ),
        ],
    )
    def test_what_stands_around_all_calls_is_no_content(self, family: str, text: str) -> None:
        message = parse(make(CHATML, family), text)
        assert message == {
            "role": "assistant",
            "content": "Yes.",
            "tool_calls": [call("add", a=1)],
        }

    def test_mistral(self) -> None:
        calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
        message = parse(make(MISTRAL), f"[TOOL_CALLS]{json.dumps(calls)}</s>")
        assert message["tool_calls"] == [call("add", a=1), call("add", a=2)]

    @pytest.mark.parametrize("mark", ["<|tool_call|>", "<tool_call>", "<tool_call> "])
    def test_granite_3_writes_calls_that_its_template_leaves_out(self, mark: str) -> None:
        text = mark + '[{"name": "add", "arguments": {"a": 1}}]'
        assert parse(make(CHATML, "mistral"), text)["tool_calls"] == [call("add", a=1)]

    def test_gemma_4_writes_null_as_none(self) -> None:
        text = '<|tool_call>call:add{a:None,b:[1,None],c:<|"|>None, a<|"|>}<tool_call|>'
        expected = call("add", a=None, b=[1, None], c="None, a")
        assert parse(make(CHATML, "gemma4"), text)["tool_calls"] == [expected]

    def test_cohere_marks_thoughts_and_answers(self) -> None:
        renderer = make(TEMPLATES["cohere"])
        thought = "<|START_THINKING|>Hm.<|END_THINKING|>"
        asked = '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>'
        message = parse(renderer, thought + asked)
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"] == [call("add", a=1)]
        answer = parse(renderer, f"{thought}<|START_RESPONSE|>It is 4.<|END_RESPONSE|>")
        assert answer["content"] == "It is 4."

    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ("[add(a=1, b='x')]", {"a": 1, "b": "x"}),
            ("add(a=-1.5, b=(true, None))", {"a": -1.5, "b": [True, None]}),
            ("[add(a={'k': [null]})]", {"a": {"k": [None]}}),
            ("[add(from='x', b = 1)]", {"from": "x", "b": 1}),
            ('[add(a=\'it\'s\', b="a "b"")]', {"a": "it's", "b": 'a "b"'}),
            ("[add(a='two\nlines', b='x=1, y')]", {"a": "two\nlines", "b": "x=1, y"}),
            (r"[add(a='C:\Users', b='\u00e9\'')]", {"a": r"C:\Users", "b": "\u00e9'"}),
            ("[add(1)]", None),
            ("[add(a='x]", None),
            pytest.param("'" * 50_000, None, id="quotes"),
            ("[add(a={1, 2})]", None),
            ("[add(a=b'x')]", None),
            ("[add(a=open('x'))]", None),
            ("[add(**{'a': 1})]", None),
            ("[add(a=1]", None),
            ("[1]", None),
        ],
    )
    def test_calls_in_python_are_values_alone(self, text: str, arguments: Any) -> None:
        message = parse(make(CHATML, "pythonic"), f"<|tool_call_start|>{text}<|tool_call_end|>")
        if arguments is None:
            assert "tool_calls" not in message
            assert message["parse_error"]
        else:
            assert message["tool_calls"] == [call("add", **arguments)]

    def test_a_tool_in_python_may_have_the_name_of_a_value(self) -> None:
        text = "<|tool_call_start|>[null.true(a=true)]<|tool_call_end|>"
        assert parse(make(CHATML, "pythonic"), text)["tool_calls"] == [call("null.true", a=True)]

    def test_deepseek_v3_2_writes_calls_as_minimax_does(self) -> None:
        renderer = make(template("dsml"))
        renderer.require_tools()
        assert renderer._parser._template == make(CHATML, "minimax_m2")._parser._template
        said = {"role": "assistant", "content": "", "tool_calls": [call("add", a=3, b="<x>")] * 2}
        text = renderer._template.render([ASKED, said], [ADD]).rpartition("assistant\n")[0]
        assert (
            parse(renderer, text.rpartition("assistant\n")[2])["tool_calls"]
            == [call("add", a=3, b="<x>")] * 2
        )

    @pytest.mark.parametrize(
        ("value", "is_text", "argument"),
        [
            ("7", "true", "7"),
            ("7", "false", 7),
            ('{"k": [1]}', "false", {"k": [1]}),
            ("x", "false", "x"),
        ],
    )
    def test_deepseek_v3_2_says_what_is_text(self, value: str, is_text: str, argument: Any) -> None:
        tag = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
        text = (
            f'<{tag}invoke name="add"><{tag}parameter name="b" string="{is_text}">{value}'
            f"</{tag}parameter></{tag}invoke>"
        )
        assert parse(make(CHATML, "minimax_m2"), text)["tool_calls"] == [call("add", b=argument)]

    def test_the_tokenizers_own_template_comes_first(self) -> None:
        own = {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "tool_calls": {
                    "open": "{{",
                    "close": "}}",
                    "repeats": True,
                    "transform": {
                        "type": "function",
                        "function": {"name": "run", "arguments": {"code": "{content}"}},
                    },
                },
                "content": {},
            },
        }
        renderer = make(HERMES, response_template=own)
        assert parse(renderer, "{{ 1 + 1 }}")["tool_calls"] == [call("run", code="1 + 1")]

    def test_a_template_of_ones_own_by_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "brackets.json"
        path.write_text(
            json.dumps(
                {
                    "start_anchor_pattern": "\\A",
                    "fields": {
                        "tool_calls": {
                            "open": "[",
                            "close": "]",
                            "repeats": True,
                            "transform": {
                                "type": "function",
                                "function": {"name": "add", "arguments": {"text": "{content}"}},
                            },
                        },
                        "content": {},
                    },
                }
            )
        )
        assert parse(make(CHATML, str(path)), "[1+1]")["tool_calls"] == [call("add", text="1+1")]


class TestUnreadable:
    @pytest.mark.parametrize(
        ("family", "text"),
        [
            ("mistral_v11", "[THINK]Hm.[/THINK][TOOL_CALLS]add[ARGS]{"),
            ("hermes", "<think>Hm.</think><tool_call>{</tool_call>"),
            (
                "gpt_oss",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
                "to=functions.add json<|message|>{<|call|>",
            ),
        ],
    )
    def test_what_was_thought_before_a_call_that_cannot_be_read(self, family: str, text: str):
        message = parse(make(TEMPLATES[family]), text)
        assert message["parse_error"]
        assert message["reasoning_content"] == "Hm."
        assert "Hm." not in message["content"]
        assert "{" in message["content"]

    @pytest.mark.parametrize("pattern", [r"(?P<key>\w+)", r"(?P<value>\w+)"])
    def test_tags_of_ones_own_template_without_a_key_or_a_value(self, pattern: str) -> None:
        calls = {"content": "tags", "content_args": {"tag_pattern": pattern}}
        fields = {"tool_calls": {"open": "[", "close": "]", **calls}, "content": {}}
        own = {"start_anchor_pattern": r"\A", "fields": fields}
        message = parse(make(CHATML, response_template=own), "[a]")
        assert (message["content"], "parse_error" in message) == ("[a]", True)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ('{"name": "add", "arguments": {"a": 1', "could not parse region as JSON"),
            ('{"arguments": {}}', "a tool call has no name"),
            ('{"name": "add", "arguments": "1"}', "'add' are no JSON object"),
            ("[1, 2]", "a tool call has no name"),
            ("[" * 100_000, "recursion"),
            (r'{"name": "add", "arguments": {"a": "\ud83d"}}', "'add' is no valid Unicode"),
            ('{"name": "add", "arguments": {"a": [1e999]}}', "'add' has a number that is none in"),
            ('{"name": "add", "arguments": {"a": NaN}}', "'add' has a number that is none in JSON"),
        ],
    )
    def test_it_is_a_message_without_calls(self, body: str, reason: str) -> None:
        text = f"<tool_call>{body}</tool_call>"
        message = parse(make(HERMES), text + "<|im_end|>")
        assert message["content"] == text
        assert "tool_calls" not in message
        assert reason in message["parse_error"]

    @given(text=st.text(alphabet='<tool_call>/{}"name:argumets,[] \n', max_size=60))
    def test_no_text_raises(self, text: str) -> None:
        for renderer in renderers():
            assert parse(renderer, text)["role"] == "assistant"
            assert parse(renderer, f"<tool_call>{text}")["role"] == "assistant"


class TestRefusals:
    def test_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match=r"data.tool_parser: was 'herms'.*hermes"):
            make(CHATML, "herms")

    def test_a_file_that_is_missing(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.tool_parser: cannot read none\.json: "):
            make(CHATML, "none.json")

    def test_a_file_that_is_no_template(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text('{"fields": {"a": {"opens": "["}}}')
        with pytest.raises(ConfigError, match=r"is no response template.*unknown keys"):
            make(CHATML, str(tmp_path / "x.json"))

    @pytest.mark.parametrize(
        ("family", "tool_parser", "sentence"),
        [
            ("", "auto", "was auto, and the chat template writes no calls"),
            ("unknown", "auto", "was auto, and none reads a call as the chat template writes it"),
            ("glm", "hermes", "was hermes, which does not read a call as the chat template writes"),
        ],
    )
    def test_calls_that_would_not_be_read(
        self, family: str, tool_parser: str, sentence: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"^data.tool_parser: {sentence}.*hermes.*PATH.json"):
            make(template(family), tool_parser).require_tools()

    def test_a_named_one_where_the_template_writes_no_calls(self) -> None:
        make(CHATML, "hermes").require_tools()


class TestRoundTrip:
    """What the model's own template renders of calls is read as these calls."""

    @pytest.mark.parametrize("name", CONVENTIONS)
    def test_auto_takes_the_convention_that_reads_them(self, name: str) -> None:
        named, chosen = make(TEMPLATES[name], name), make(TEMPLATES[name])
        chosen.require_tools()
        assert chosen._parser._template == named._parser._template

    @pytest.mark.parametrize("name", CONVENTIONS)
    @pytest.mark.parametrize(
        "text", ["7", 'a "b" \\ c', "two\nlines", "</tool_call>", "<tool_call>x</tool_call>", "}"]
    )
    def test_calls_survive(self, name: str, text: str) -> None:
        renderer = make(TEMPLATES[name])
        calls = [call("add", a=3, b=text), call("add")][: 1 if name in ("llama3", "gpt_oss") else 2]
        opening = renderer.encode_messages([ASKED], [ADD])
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        whole = renderer._template.render([ASKED, said], [ADD], is_open=False)
        completion = renderer.encode_text(whole.removesuffix("\n"))[len(opening) :]
        assert renderer.parse(completion, [ADD])["tool_calls"] == calls

    def test_a_templates_thinking_is_no_part_of_a_call(self) -> None:
        make(THINKS).require_tools()
        make(THINKS.replace("<think>", "<think></think>")).require_tools()
