"""Prompts to token ids and completions to text: chat template, length, truncation.

Invariant: the ids that the engine gets are the ids that are recorded; nothing is tokenized twice.

A reply is what a chat template puts between a completion and the next one. The template renders a
short conversation, whose assistant turn is a mark, with the new messages behind it. What follows
the mark is the reply: the end of the assistant's turn, the messages, and the opening of the next
turn. The completion is not part of it, so it is never tokenized again.

The reply does not depend on what was said before. A template that renders a message
differently once others follow it (Qwen3 leaves out earlier thinking) renders a conversation
otherwise than it was sampled; a reply follows the tokens as they were sampled.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from actors.rendering.messages import is_prefill
from actors.rendering.parsing import CONVENTIONS, MessageParser
from actors.rendering.vision import PromptVision, load_media
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Message, Prompt, ToolSchema
from streamrl.types import Media
from streamrl.vision.parts import as_template_reads, media_of

_MARK = "streamrlcompletion"
_PROBE = "streamrlanswer"
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# How vocabularies write bytes: SentencePiece each as a token, byte-level BPE in GPT-2's alphabet.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_ASKED: Message = {"role": "user", "content": "question"}
_ANSWERED: Message = {"role": "assistant", "content": _MARK}


Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the opening of the next turn follows, to text."""


def reply_text(render: Render, messages: Sequence[Message]) -> str:
    """What follows a completion that has not ended its turn.

    Raises:
        ConfigError: the template does not render the content of an assistant.
    """
    _, mark, reply = render([_ASKED, _ANSWERED, *messages], True).partition(_MARK)
    if not mark:
        raise ConfigError(
            "data.chat_template: it does not render an assistant's content, so an environment "
            "cannot answer with messages; name a template that does"
        )
    return reply


def end_of_turn_text(render: Render) -> str:
    """What the template puts behind an assistant's content."""
    return render([_ASKED, _ANSWERED], False).partition(_MARK)[2]


def require_replies(render: Render) -> None:
    """
    Raises:
        ConfigError: a user's message behind a completion is not rendered.
    """
    if _PROBE not in reply_text(render, [{"role": "user", "content": _PROBE}]):
        raise ConfigError(
            "data.chat_template: it does not render a user's message behind an assistant's, so an "
            "environment cannot answer with messages; name a template that does"
        )


class PromptTooLongError(Exception):
    """The prompt exceeds `data.max_prompt_length` and is left out by `data.truncation`."""


class ChatRenderer:
    """A tokenizer with the run's chat template and length rules."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataSettings,
        vision: PromptVision | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._vision = vision
        self._template = _template(tokenizer, data)
        self._parser = MessageParser(tokenizer, self._template, data.tool_parser)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded; else there is text alone."""
        return self._template is not None

    @classmethod
    def from_config(cls, config: RunConfig) -> "ChatRenderer":
        model = config.model
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.tokenizer_path, trust_remote_code=model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path: no tokenizer at {model.tokenizer_path!r}: {error}"
            ) from error
        return cls(tokenizer, config.data, PromptVision.of(model))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the prompt, at most `data.max_prompt_length`.

        Raises:
            ConfigError: longer, and `data.truncation` is `error`.
            PromptTooLongError: longer, and it is `drop`, or `filter` where no row was filtered.
        """
        ids = self._ids(prompt)
        longest = self._data.max_prompt_length
        if len(ids) <= longest:
            return ids
        match self._data.truncation:
            case "left" | "right" if self.media_of(prompt):
                raise ConfigError(
                    f"data.truncation {self._data.truncation}: {_place(prompt)} has {len(ids)} "
                    f"tokens, of which data.max_prompt_length keeps {longest}, and images cannot "
                    "be cut; drop or error would do"
                )
            case "left":
                return ids[-longest:]
            case "right":
                return ids[:longest]
            case "drop" | "filter":
                raise PromptTooLongError(f"{len(ids)} tokens")
            case "error":
                raise ConfigError(
                    f"data.max_prompt_length {longest}: {_place(prompt)} has {len(ids)} tokens "
                    f"({str(prompt.content)[:60]!r}...); data.truncation left, right or drop "
                    "would take it"
                )

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt has at most `data.max_prompt_length` tokens. One whose images cannot
        be read does: it fails when it is sampled, and is counted."""
        try:
            return len(self._ids(load_media(prompt))) <= self._data.max_prompt_length
        except RolloutError:
            return True

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of the text as it stands, without a chat template or special tokens."""
        return self._token_ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        ids = self._parser.without_end(token_ids)
        if self._special_ids.isdisjoint(ids):
            return self._parser.decode(ids)
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def bytes_of(self, token_id: int) -> bytes | None:
        """See `Renderer.bytes_of`."""
        text = self.decode([token_id])
        if _NO_CHARACTER not in text:
            return text.encode()
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(found[1])
        known = [_BYTES.get(character) for character in token]
        return None if None in known else bytes(byte for byte in known if byte is not None)

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation up to the place where the policy's next turn begins.

        Raises:
            ConfigError: there is no template, or it cannot render them.
        """
        place = "a conversation"
        return self._encoded(self._text(messages, tools, place), messages, place)

    def encode_reply(
        self,
        messages: Sequence[Message],
        completion_token_ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...]:
        """Token ids between the end of a completion and the place where the next one begins.

        A completion that ended with the template's end-of-turn token, or with the one that opens
        the reply, is followed by what the template puts behind it; any other one is ended first.

        Raises:
            ConfigError: there is no template, or it cannot render them.
        """

        def render(conversation: Sequence[Message], is_open: bool) -> str:
            return self._text(conversation, tools, "a reply", is_open=is_open)

        ids = self._encoded(reply_text(render, messages), messages, "a reply")
        ends = {self._end_of_turn, *ids[:1]} & self._special_ids
        for last in completion_token_ids[-1:]:
            if last in ends and last in ids:
                return ids[ids.index(last) + 1 :]
        return ids

    def require_replies(self) -> None:
        """
        Raises:
            ConfigError: there is a template, and it cannot render a reply to a completion.
        """
        if self._template is not None:
            require_replies(self._render)

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """The conversation that the prompt opens."""
        return tuple(self._messages(prompt.content))

    @cached_property
    def _end_of_turn(self) -> int | None:
        """The special token with which the template ends an assistant's turn, if it has one."""
        ids = self.encode_text(end_of_turn_text(self._render))
        return next((token for token in ids if token in self._special_ids), None)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset((*self._tokenizer.all_special_ids, *added))

    def _render(self, messages: Sequence[Message], is_open: bool) -> str:
        return self._text(messages, (), "a conversation", is_open=is_open)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """What a completion says, as a message of the assistant; see `Renderer.parse`."""
        return self._parser.parse(token_ids, tools, self._generation_prompt)

    def require_tool_calls(self) -> None:
        """
        Raises:
            ConfigError: `parse` would find no tool calls.
        """
        if not self._parser.knows_tool_calls:
            raise ConfigError(
                "data.tool_parser: the chat template has no convention of tool calls that is "
                f"known; name one of {', '.join(CONVENTIONS)}, or PATH.json"
            )

    @cached_property
    def _generation_prompt(self) -> str:
        """What the template puts in front of a completion."""
        if self._template is None:
            return ""
        opening = [{"role": "user", "content": "?"}]
        try:
            return self._render(opening, True).removeprefix(self._render(opening, False))
        except ConfigError:
            return ""

    @property
    def prefill(self) -> str:
        """See `Renderer.prefill`."""
        _, opened, behind = self._generation_prompt.rpartition("<think>")
        return opened + behind if opened else ""

    def media(self, messages: Sequence[Message]) -> tuple[Media, ...]:
        """The images and videos of a conversation, in order.

        Raises:
            RolloutError: one is malformed, or a path.
        """
        return media_of(messages, "a conversation")

    def media_of(self, prompt: Prompt) -> tuple[Media, ...]:
        """Those of a prompt whose media were read."""
        return () if isinstance(prompt.content, str) else media_of(prompt.content, _place(prompt))

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        content = prompt.content
        if self._template is None and isinstance(content, str):
            return self._token_ids(f"{self._data.system_prompt or ''}{content}")
        messages, place = self._messages(content), _place(prompt)
        is_begun = bool(messages) and is_prefill(messages[-1])
        text = self._text(messages, (), place, is_begun=is_begun)
        return self._encoded(text, messages, place)

    def _token_ids(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """
        Raises:
            RolloutError: the text is no valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RolloutError(
                f"a text cannot be tokenized: character {error.start} is "
                f"{text[error.start]!a}, half a surrogate pair"
            ) from error
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        place: str,
        *,
        is_open: bool = True,
        is_begun: bool = False,
    ) -> str:
        """The conversation as the template renders it, with the opening of the next turn.

        Args:
            is_begun: its last message is the beginning of that turn.
        """
        if self._template is None:
            raise ConfigError(
                f"data.chat_template: {place} is a list of messages, but the "
                "tokenizer has no chat template; name a Jinja file"
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                as_template_reads(messages),
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._template,
                add_generation_prompt=is_open and not is_begun,
                continue_final_message=is_begun,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"data.chat_template: it cannot render {place}: {error}") from error
        return str(rendered)

    def _encoded(self, text: str, messages: Sequence[Message], place: str) -> tuple[int, ...]:
        """Token ids of a rendered conversation as the model reads them, its images included."""
        token_ids, media = self.encode_text(text), media_of(messages, place)
        if self._vision is not None:
            return self._vision.expand(token_ids, media, place)
        if media:
            raise ConfigError(f"model.path: {place} has images, and the model sees none")
        return token_ids

    def _messages(self, content: str | Sequence[Message]) -> list[Message]:
        if not isinstance(content, str):
            return list(content)
        system = self._data.system_prompt
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, {"role": "user", "content": content}]


def _place(prompt: Prompt) -> str:
    return prompt.origin or "a prompt"


def _template(tokenizer: PreTrainedTokenizerBase, data: DataSettings) -> str | None:
    match data.chat_template:
        case "none":
            return None
        case "native":
            template: str | None = tokenizer.chat_template
            return template
        case Path() as path:
            try:
                return path.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"data.chat_template: {path}: {error.strerror}") from error
