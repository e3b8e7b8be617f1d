"""Template parity: opening + completion + reply are the ids of the template for the whole."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.rendering.chat_template import ChatTemplate
from actors.rendering.renderer import ChatRenderer
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import Message

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the tokenizers of Llama 3 and Qwen cut a text."""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>"),
]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>"}
QUESTION: Message = {"role": "user", "content": "What is 3 + 4?\n"}
THOUGHT = "<think>\n3 and 4 are 7.\n</think>\n\n7"
REPLIES: dict[str, tuple[Message, ...]] = {
    "user": ({"role": "user", "content": "And 5 + 6?"},),
    "tool": ({"role": "tool", "content": "7"},),
    "tools": ({"role": "tool", "content": "7"}, {"role": "tool", "content": "an error"}),
    "system": ({"role": "system", "content": "One try is left."}, QUESTION),
}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges over line ends and words, as Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [THOUGHT, "\n\n", "system\nuser\nassistant\n", "<tool_response>\n7\n</tool_response>"]
    tokenizer.train_from_iterator(text * 20, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def renderer_of(template: Path) -> ChatRenderer:
    data = DataSettings.model_validate({"source": "addition", "chat_template": template})
    return ChatRenderer(byte_level_tokenizer(), data)


def whole(name: str, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
    """As the template renders the conversation; tokenized as one text."""
    text = byte_level_tokenizer().apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
        add_generation_prompt=True,
        tokenize=False,
    )
    return byte_level_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "with_tools"])
@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("name", ENDS)
def test_parity_with_the_template(name: str, reply: str, is_ended: bool, tools):
    renderer = renderer_of(TEMPLATES / f"{name}.jinja")
    # Qwen3 renders an answer to the last question with its thinking, an earlier one without.
    text = THOUGHT if name == "qwen3" and reply.startswith("tool") else "It is 7"
    opening = renderer.encode_messages([QUESTION], tools)
    completion = renderer.encode_text(text + (ENDS[name] if is_ended else ""))
    behind = renderer.encode_reply(REPLIES[reply], completion, tools)
    conversation = [QUESTION, {"role": "assistant", "content": text}, *REPLIES[reply]]
    assert [*opening, *completion, *behind] == whole(name, conversation, tools)


@pytest.mark.parametrize("name", ENDS)
def test_parity_over_many_turns(name: str):
    renderer = renderer_of(TEMPLATES / f"{name}.jinja")
    conversation: list[Message] = [QUESTION]
    ids = renderer.encode_messages(conversation)
    for number, reply in enumerate(REPLIES.values()):
        # A completion that was cut in the middle of its turn, too.
        end = ENDS[name] if number % 2 else ""
        completion = renderer.encode_text(f"answer {number}{end}")
        ids = (*ids, *completion, *renderer.encode_reply(reply, completion))
        conversation += [{"role": "assistant", "content": f"answer {number}"}, *reply]
    assert list(ids) == whole(name, conversation)


def test_qwen3_keeps_the_thinking_that_was_sampled_where_the_template_drops_it():
    renderer = renderer_of(TEMPLATES / "qwen3.jinja")
    opening = renderer.encode_messages([QUESTION])
    completion = renderer.encode_text(f"{THOUGHT}<|im_end|>")
    behind = renderer.encode_reply(REPLIES["user"], completion)
    said = {"role": "assistant", "content": THOUGHT}
    rendered = whole("qwen3", [QUESTION, said, *REPLIES["user"]])
    kept = [*opening, *completion, *behind]
    assert kept != rendered
    # What differs is the thinking alone.
    thinking = renderer.encode_text(THOUGHT.removesuffix("7"))
    assert [*opening, *kept[len(opening) + len(thinking) :]] == rendered
    assert tuple(kept[len(opening) :][: len(thinking)]) == thinking


def test_a_role_that_the_template_leaves_out_is_refused():
    renderer = renderer_of(TEMPLATES / "chatml.jinja")
    lost = {"role": "narrator", "content": "A door opens."}
    sentence = "it leaves out messages of the role 'narrator'"
    with pytest.raises(ConfigError, match=sentence):
        renderer.encode_messages([QUESTION, lost])
    with pytest.raises(ConfigError, match=sentence):
        renderer.encode_reply([lost], renderer.encode_text("7"))
    other = renderer_of(TEMPLATES / "llama3.jinja")
    assert "A door opens." in other.decode(other.encode_messages([QUESTION, lost]))


def test_a_system_message_is_refused_where_the_template_reads_only_the_first(tmp_path):
    template = tmp_path / "first.jinja"
    template.write_text(
        "{{ messages[0].content if messages[0].role == 'system' }}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    renderer = renderer_of(template)
    system = {"role": "system", "content": "Be brief."}
    assert "Be brief." in renderer.decode(renderer.encode_messages([system, QUESTION]))
    sentence = "leaves out messages of the role 'system' behind the first message"
    with pytest.raises(ConfigError, match=sentence):
        renderer.encode_messages([system, QUESTION, system])
    with pytest.raises(ConfigError, match=sentence):
        renderer.encode_reply([system], renderer.encode_text("7"))


def test_a_reply_opens_a_turn_as_a_prompt_does():
    """A template that opens an empty thinking for the policy does so behind a reply, too."""
    text = (TEMPLATES / "qwen3.jinja").read_text()
    renderer = renderer_of(TEMPLATES / "qwen3.jinja")
    closes = "{%- set enable_thinking = false %}" + text
    renderer._template = ChatTemplate(byte_level_tokenizer(), closes)
    closed = renderer.encode_text("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert renderer.encode_messages([QUESTION])[-len(closed) :] == closed
    assert renderer.encode_reply(REPLIES["user"], ())[-len(closed) :] == closed


def test_a_completion_that_another_token_ended_is_ended_by_the_template():
    renderer = renderer_of(TEMPLATES / "chatml.jinja")
    behind = renderer.encode_reply(REPLIES["user"], renderer.encode_text("7<|endoftext|>"))
    assert behind == renderer.encode_text(
        "<|im_end|>\n<|im_start|>user\nAnd 5 + 6?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("completion", "ending"), [("7<|im_end|><|endoftext|>", ""), ("7<|im_end|>8", "<|im_end|>")]
)
def test_what_follows_the_end_of_a_turn_is_its_end_of_sequence_or_a_turn_that_goes_on(
    completion: str, ending: str
) -> None:
    renderer = renderer_of(TEMPLATES / "chatml.jinja")
    behind = renderer.encode_reply(REPLIES["user"], renderer.encode_text(completion))
    assert behind == renderer.encode_text(
        f"{ending}\n<|im_start|>user\nAnd 5 + 6?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_line_end_that_was_sampled_is_not_the_one_of_the_template():
    renderer = renderer_of(TEMPLATES / "chatml.jinja")
    behind = renderer.encode_reply(REPLIES["user"], renderer.encode_text("7\n"))
    assert renderer.decode(behind).startswith("\nuser\n")
    assert behind[0] == renderer.encode_text("<|im_end|>")[0]


def test_a_policy_that_samples_the_next_role_itself_is_followed_by_its_content(tmp_path):
    """As GLM does: no token ends a turn, the one that opens the next does."""
    template = tmp_path / "roles.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '' }}{{ m.content }}"
        "{% endfor %}"
    )
    renderer = renderer_of(template)
    behind = renderer.encode_reply(REPLIES["user"], renderer.encode_text("7<|user|>"))
    assert behind == renderer.encode_text("And 5 + 6?")
    assert renderer.encode_reply(REPLIES["user"], (99,)) == renderer.encode_text(
        "<|user|>And 5 + 6?"
    )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ messages[0].content }}", "it does not render an assistant's content"),
        (
            "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}",
            "it does not render a user's message behind an assistant's",
        ),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}",
            "it cannot render a reply: one question",
        ),
    ],
)
def test_a_template_that_cannot_render_a_reply_is_refused(tmp_path, template: str, sentence: str):
    path = tmp_path / "own.jinja"
    path.write_text(template)
    with pytest.raises(ConfigError, match=rf"^data\.chat_template: {sentence}"):
        renderer_of(path).require_replies()


@pytest.mark.parametrize("name", ENDS)
def test_the_templates_render_replies(name: str):
    renderer_of(TEMPLATES / f"{name}.jinja").require_replies()
