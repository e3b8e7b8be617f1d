"""What chat templates leave out is rendered otherwise, or refused before a token is sampled."""

import json
import string
from typing import Any

import pytest

from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import Message, Prompt
from tests.unit.rendering.test_parsing import ADD, ASKED, CHATML, FOLDER, HERMES, TEMPLATES, call

SPECIAL = ["<turn|>", "<|tool_response>", "<tool_call|>", '<|"|>', "<|end|>", "<|call|>", "[/INST]"]
RESULT: Message = {"role": "tool", "name": "add", "content": "7"}


def make(template: str, **settings: Any) -> ChatRenderer:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, DataSettings(source="reverse", **settings))


def of_results(family: str, **settings: Any) -> ChatRenderer:
    text = (FOLDER / "results.jinja").read_text()
    return make(f"{{%- set family = '{family}' -%}}{text}", **settings)


def read(renderer: ChatRenderer, token_ids: tuple[int, ...]) -> str:
    return str(renderer._tokenizer.decode(token_ids))


class TestResults:
    """A tool's result is what the policy reads, or the run does not start."""

    CALL = '<|tool_call>call:add{text:<|"|>3+4<|"|>}<tool_call|>'
    RENDERED = 'response:add{value:<|"|>7<|"|>}<tool_response|>'

    @pytest.mark.parametrize(
        ("end", "reply"),
        [
            ("<|tool_response>", RENDERED),
            ("", f"<|tool_response>{RENDERED}"),
            ("<turn|>", f"<|tool_response>{RENDERED}"),
        ],
    )
    def test_a_template_that_renders_results_behind_calls_alone(self, end: str, reply: str) -> None:
        renderer = of_results("gemma4")
        completion = renderer.encode_text(self.CALL + end)
        assert read(renderer, renderer.encode_reply([RESULT], completion, [ADD])) == reply

    def test_parity_with_the_whole_conversation(self) -> None:
        renderer = of_results("gemma4")
        opening = renderer.encode_messages([ASKED])
        completion = renderer.encode_text(f"{self.CALL}<|tool_response>")
        calls = [{"id": "1", **call("add", text="3+4")}]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        whole = renderer.encode_messages([ASKED, said, RESULT, {**RESULT, "content": "8"}])
        reply = renderer.encode_reply([RESULT, {**RESULT, "content": "8"}], completion)
        assert (*opening, *completion, *reply) == whole

    def test_a_template_that_raises_for_a_result_behind_no_call(self) -> None:
        renderer = of_results("gpt_oss")
        completion = renderer.encode_text(' to=add<|message|>{"text": "3+4"}<|call|>')
        reply = "<|start|>add to=assistant<|message|>7<|end|><|start|>assistant"
        assert read(renderer, renderer.encode_reply([RESULT], completion)) == reply

    def test_other_replies_stand_behind_a_content(self) -> None:
        renderer = of_results("gemma4")
        reply = renderer.encode_reply([ASKED], renderer.encode_text("7<turn|>"))
        assert read(renderer, reply) == "\n<|turn>user\n1+2?<turn|>\n<|turn>model\n"

    @pytest.mark.parametrize("family", ["phi3", "gemma3"])
    def test_a_template_that_loses_results_is_refused(self, family: str) -> None:
        renderer = of_results(family, tool_parser="hermes")
        renderer.require_replies()
        sentence = r"^data\.chat_template: it does not render messages of the role tool"
        with pytest.raises(ConfigError, match=sentence):
            renderer.require_tools()
        with pytest.raises(ConfigError, match=sentence):
            renderer.encode_messages([ASKED, {"role": "assistant", "content": "?"}, RESULT])
        with pytest.raises(ConfigError, match=sentence):
            renderer.encode(Prompt((ASKED, RESULT), "7"))

    def test_a_result_has_an_id_of_nine_letters_and_digits(self) -> None:
        renderer = make(
            "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
            "{{ raise_exception('nine characters') }}{% endif %}[{{ m.tool_call_id }}]{% endif %}"
            "{{ m.content }}{% endfor %}"
        )
        twice = renderer.encode_reply([RESULT, RESULT], ())
        assert read(renderer, twice) == "[call00000]7[call00001]7"


def test_whatever_a_template_raises_is_a_sentence():
    # A method of text that raises a KeyError.
    renderer = make("{{ messages[0]['content'].format(1) }}")
    with pytest.raises(ConfigError, match=r"^data\.chat_template: it cannot render .*KeyError"):
        renderer.encode_messages([{"role": "user", "content": "{name}"}])


class TestSchemas:
    """The policy knows its tools, or somebody has said that it need not."""

    WITHOUT = TEMPLATES["hermes"].replace("tools or []", "[]")

    def test_a_template_that_leaves_them_out_is_refused(self) -> None:
        for tool_parser in ("auto", "hermes"):
            renderer = make(self.WITHOUT, tool_parser=tool_parser)
            sentence = r"^data\.chat_template: it leaves out the tools.*tool_schemas"
            with pytest.raises(ConfigError, match=sentence):
                renderer.require_tools()
            with pytest.raises(ConfigError, match=sentence):
                renderer.encode_messages([ASKED], [ADD])

    def test_they_are_written_into_the_system_message(self) -> None:
        renderer = make(self.WITHOUT, tool_schemas="system_message")
        renderer.require_tools()
        schema = f"<tools>\n{json.dumps(ADD)}\n</tools>"
        begun = {"role": "system", "content": "Be brief."}
        for messages, system in (
            ([ASKED], f"You may call these tools:\n{schema}"),
            ([begun, ASKED], f"Be brief.\n\nYou may call these tools:\n{schema}"),
        ):
            text = read(renderer, renderer.encode_messages(messages, [ADD]))
            assert text.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n1+2")

    def test_they_are_left_out_on_purpose(self) -> None:
        renderer = make(self.WITHOUT, tool_schemas="omit")
        renderer.require_tools()
        without = renderer.encode_messages([ASKED])
        assert renderer.encode_messages([ASKED], [ADD]) == without

    def test_a_tokenizer_with_a_template_for_tools(self) -> None:
        renderer = make({"default": self.WITHOUT, "tool_use": TEMPLATES["hermes"]})  # type: ignore[arg-type]
        renderer.require_tools()
        assert read(renderer, renderer.encode_messages([ASKED], [ADD])).startswith('{"type"')
        assert read(renderer, renderer.encode_messages([ASKED])).startswith("<|im_start|>user")

    def test_nobody_asks_for_them_without_tools(self) -> None:
        assert make(CHATML).encode_messages([ASKED])


@pytest.mark.parametrize("written", ["'' + f.arguments", "f.arguments"])
def test_a_template_that_takes_arguments_as_text_gets_them_as_json(written):
    """Those of DeepSeek-V3 to V3.1 join them to text."""
    renderer = make(HERMES.replace("f.arguments | tojson", written))
    renderer.require_tools()
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **call("add", a=3)}]}
    text = read(renderer, renderer.encode_messages([ASKED, said, RESULT], [ADD]))
    assert '{"name": "add", "arguments": {"a": 3}}' in text


def test_a_template_that_writes_whole_calls_as_python_does_gets_them_as_they_are():
    written = HERMES.replace("f.arguments | tojson", "({'x': f.arguments} | string)")
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **call("add", a=3)}]}
    renderer = make(written)
    assert "{'x': {'a': 3}}" in read(renderer, renderer.encode_messages([ASKED, said], [ADD]))


class TestParts:
    """A template that iterates over the parts of a content makes no empty prompt of a string."""

    TEMPLATE = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}"
        "{{ part.text }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def test_strings_are_rendered_as_parts(self) -> None:
        renderer = make(self.TEMPLATE)
        renderer.require_replies()
        system = {"role": "system", "content": "Be brief."}
        opening = renderer.encode_messages([system, ASKED])
        assert read(renderer, opening) == "<system>Be brief.<user>1+2?<assistant>"
        assert read(renderer, renderer.encode_reply([ASKED], ())) == "<user>1+2?<assistant>"

    def test_lists_of_parts_stay(self) -> None:
        text = {"role": "user", "content": [{"type": "text", "text": "1+2?"}]}
        renderer = make(self.TEMPLATE)
        assert read(renderer, renderer.encode_messages([text])) == "<user>1+2?<assistant>"

    def test_a_template_of_strings_gets_strings(self) -> None:
        text = (
            "{% for m in messages %}{{ 'text' if m.content is string else 'parts' }}{{ m.content }}"
        )
        renderer = make(text + "{% endfor %}")
        assert read(renderer, renderer.encode_messages([ASKED])) == "text1+2?"
