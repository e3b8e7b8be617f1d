"""Completions of real template conventions become messages; none of them raises."""

import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = CHATML + "{# <tool_call> #}"
THINKS = HERMES.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
CODER = HERMES + "{# <function= #}"
LLAMA = CHATML + '{# <|start_header_id|> "parameters" #}'
MISTRAL = CHATML + "{# [TOOL_CALLS] #}"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def make(chat_template: str, tool_parser: str = "auto", **own: Any) -> ChatRenderer:
    tokenizer = characters()
    tokenizer.chat_template = chat_template
    for name, value in own.items():
        setattr(tokenizer, name, value)
    settings = DataSettings(source="reverse", tool_parser=tool_parser)
    return ChatRenderer(tokenizer, settings)


@cache
def renderers() -> list[ChatRenderer]:
    return [make(template) for template in (HERMES, CODER, LLAMA, MISTRAL)]


def characters() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|python_tag|>"]})
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
        for template in (HERMES, CODER, LLAMA, MISTRAL, CHATML):
            assert parse(make(template), "It is 4.<|im_end|>") == expected

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

    def test_reasoning_that_the_template_opens(self) -> None:
        message = parse(make(THINKS), "Hm.\n</think>\n\nFour.<|im_end|>")
        assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}

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

    @pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
    def test_llama(self, tag: str) -> None:
        message = parse(make(LLAMA), tag + '{"name": "add", "parameters": {"a": 1}}</s>')
        assert message == {"role": "assistant", "content": "", "tool_calls": [call("add", a=1)]}

    def test_llama_json_within_text_is_text(self) -> None:
        text = 'See {"name": "add", "parameters": {}}'
        assert parse(make(LLAMA), text) == {"role": "assistant", "content": text}

    def test_mistral(self) -> None:
        calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
        message = parse(make(MISTRAL), f"[TOOL_CALLS]{json.dumps(calls)}</s>")
        assert message["tool_calls"] == [call("add", a=1), call("add", a=2)]

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
        ("body", "reason"),
        [
            ('{"name": "add", "arguments": {"a": 1', "could not parse region as JSON"),
            ('{"arguments": {}}', "a tool call has no name"),
            ('{"name": "add", "arguments": "1"}', "'add' are no JSON object"),
            ("[1, 2]", "a tool call has no name"),
            ("[" * 100_000, "recursion"),
            (r'{"name": "add", "arguments": {"a": "\ud83d"}}', "'add' is no valid Unicode"),
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
        with pytest.raises(ConfigError, match=r"data.tool_parser: none.json: No such file"):
            make(CHATML, "none.json")

    def test_a_file_that_is_no_template(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text('{"fields": {"a": {"opens": "["}}}')
        with pytest.raises(ConfigError, match=r"is no response template.*unknown keys"):
            make(CHATML, str(tmp_path / "x.json"))

    def test_a_template_without_a_convention_knows_no_calls(self) -> None:
        make(HERMES).require_tool_calls()
        with pytest.raises(ConfigError, match=r"data.tool_parser: the chat template has no"):
            make(CHATML).require_tool_calls()
