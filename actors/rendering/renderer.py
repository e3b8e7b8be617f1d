"""Prompts to token ids and completions to text: chat template, length, truncation, images.

Invariant: the ids given to the engine are the ids that are recorded, including image placeholders;
nothing is tokenized twice.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from actors.rendering.chat_template import PROBED_TOOL, ChatTemplate, num_shared, opened_thinking
from actors.rendering.messages import is_prefill
from actors.rendering.parsing import MessageParser
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError, RolloutError, read_text
from streamrl.interfaces import Message, Prompt, ToolSchema
from streamrl.types import Media
from streamrl.vision.parts import has_media, loaded, media_of
from streamrl.vision.patches import PatchReader
from streamrl.vision.places import Placeholders


@dataclass(frozen=True)
class PromptVision:
    """How a model that sees images reads them."""

    reader: PatchReader
    placeholders: Placeholders

    @classmethod
    def of(cls, model: ModelSettings) -> "PromptVision | None":
        """Return how the model reads images; None if it reads none.

        Raises:
            ConfigError: there is no model, or its image processor is missing.
        """
        folder = Path(model.path)
        if folder.is_dir() and not (folder / "config.json").is_file():
            # A folder with only a tokenizer is enough for text.
            return None
        trust = model.trust_remote_code
        reader = PatchReader.of(model.path, trust_remote_code=trust)
        if reader is None:
            return None
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=trust)
        return cls(reader, Placeholders.of(config))

    def expand(
        self, token_ids: Sequence[int], media: Sequence[Media], place: str
    ) -> tuple[int, ...]:
        """Expand image placeholders in the token ids of a rendered template, as the model reads
        them.

        Raises:
            RolloutError: a medium is malformed, or a text contains a placeholder token.
        """
        sizes = [self.reader.size(medium, place) for medium in media]
        return self.placeholders.expand(token_ids, sizes, place)


def sees_media(prompt: Prompt) -> bool:
    """Whether the prompt's messages hold images or videos."""
    return not isinstance(prompt.content, str) and has_media(prompt.content)


def load_media(prompt: Prompt) -> Prompt:
    """The prompt with its media read.

    Raises:
        RolloutError: a file cannot be read, or holds no image within the limits.
    """
    if isinstance(prompt.content, str):
        return prompt
    return replace(prompt, content=loaded(prompt.content, _place(prompt), prompt.folder))


_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# How vocabularies represent bytes: SentencePiece as one token each, byte-level BPE in GPT-2's
# alphabet.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class PromptTooLongError(Exception):
    """The prompt exceeds `data.max_prompt_length` and is dropped by `data.truncation`."""


class ChatRenderer:
    """A `streamrl.interfaces.Renderer`: a tokenizer, the run's chat template and length rules."""

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
        if data.system_prompt and self._template is not None:
            self._template.require_system("data.system_prompt")
        self._parser = MessageParser(tokenizer, self._template, data.tool_parser)

    @property
    def has_chat_template(self) -> bool:
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
            ConfigError: the prompt is longer, and `data.truncation` is `error`.
            PromptTooLongError: the prompt is longer, and `data.truncation` is `drop`, or `filter`
                but rows were not filtered.
        """
        ids = self.token_ids_of(prompt)
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
        """Whether the prompt is within `data.max_prompt_length`. A prompt whose images cannot be
        read counts as fitting: it fails, and is counted, when it is sampled."""
        try:
            return len(self.token_ids_of(load_media(prompt))) <= self._data.max_prompt_length
        except RolloutError:
            return True

    def encode_text(self, text: str) -> tuple[int, ...]:
        return self._token_ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = self._parser.without_end(token_ids)
        if self._special_ids.isdisjoint(ids):
            return self._parser.decode(ids)
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def vocabulary_sample(self, count: int) -> tuple[Sequence[int], str]:
        """About `count` token ids, spread over the vocabulary, and their text, to recognize a
        different tokenizer. Special tokens, which engines may leave out, are not among them."""
        plain = sorted(set(self._tokenizer.get_vocab().values()) - self._special_ids)
        token_ids = plain[:: max(1, len(plain) // count)]
        return token_ids, str(self._tokenizer.decode(token_ids))

    def bytes_of(self, token_id: int) -> bytes | None:
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
        """
        Raises:
            ConfigError: there is no template, or it cannot render them.
        """
        place = "a conversation"
        template = self._required(messages, place)
        match self._data.tool_schemas if tools else "omit":
            case "template" if not template.describes_tools:
                raise ConfigError(
                    "data.chat_template: it leaves out the tools, so the policy would not know "
                    "them; name one that describes them, or set data.tool_schemas: "
                    "system_message, or omit where it learns of them otherwise"
                )
            case "system_message":
                template.require_system("the tools")
                messages = _described(messages, tools)
                self._required(messages, place)
        text = template.render(messages, self._for_template(tools), place)
        return self._encoded(text, messages, place)

    def encode_reply(
        self,
        messages: Sequence[Message],
        completion_token_ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...]:
        """Token ids that follow a completion. If it ended with the token that ends a turn in the
        template, or with the one that opens the reply, the result is what the template puts after
        that token; otherwise the result ends the turn first. The ending token may be followed by an
        end of sequence, which not every template writes.

        Raises:
            ConfigError: there is no template, or it cannot render them.
        """
        template = self._required(messages, "a reply", is_reply=True)
        reply = template.reply(messages, self._for_template(tools))
        ids = self._encoded(reply.text, messages, "a reply")
        num_ending = num_shared(ids, self.encode_text(reply.ending))
        ends = self._special_ids.intersection(ids[: num_ending + 1])
        for last in completion_token_ids[:-3:-1]:
            if last in ends:
                return ids[ids.index(last) + 1 :]
            if last not in self._special_ids:
                break
        if not reply.is_behind_call:
            return ids
        ending = [i for i in range(num_ending) if ids[i] in self._special_ids]
        return ids[ending[-1] if ending else num_ending :]

    def require_replies(self) -> None:
        """Raise ConfigError if there is a template but it renders no reply to a completion."""
        if self._template is not None:
            self._template.require_replies()

    def require_tools(self) -> None:
        """
        Raises:
            ConfigError: the chat template leaves out tools or their results, or `parse` finds no
                calls.
        """
        self.encode_messages([{"role": "user", "content": "?"}], [PROBED_TOOL])
        self._required([{"role": "tool"}], "a tool's result")
        self._parser.require_tool_calls()

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        if not isinstance(prompt.content, str):
            return tuple(prompt.content)
        system = self._data.system_prompt
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return (*opening, {"role": "user", "content": prompt.content})

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset((*self._tokenizer.all_special_ids, *added))

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] | None = ()) -> Message:
        return self._parser.parse(token_ids, tools)

    @property
    def prefill(self) -> str:
        return "" if self._template is None else opened_thinking(self._template.generation_prompt)

    def media(self, messages: Sequence[Message]) -> tuple[Media, ...]:
        """The media in the messages. Raises RolloutError if one is malformed or a path."""
        return media_of(messages, "a conversation")

    def media_of(self, prompt: Prompt) -> tuple[Media, ...]:
        """The media of a prompt that `load_media` has read."""
        return () if isinstance(prompt.content, str) else media_of(prompt.content, _place(prompt))

    def token_ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of the whole prompt, without a length limit."""
        content = prompt.content
        if self._template is None and isinstance(content, str):
            return self._token_ids(f"{self._data.system_prompt or ''}{content}")
        messages, place = self.messages(prompt), _place(prompt)
        is_begun = bool(messages) and is_prefill(messages[-1])
        text = self._required(messages, place).render(messages, (), place, is_begun=is_begun)
        return self._encoded(text, messages, place)

    def _token_ids(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RolloutError(
                f"a text cannot be tokenized: character {error.start} is "
                f"{text[error.start]!a}, half a surrogate pair"
            ) from error
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _for_template(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        """The tools that the template describes."""
        return tools if self._data.tool_schemas == "template" else ()

    def _required(
        self, messages: Sequence[Message], place: str, *, is_reply: bool = False
    ) -> ChatTemplate:
        """The template, which shows the messages' roles where they are: at the beginning of a
        conversation, or in a reply behind other messages."""
        if self._template is None:
            raise ConfigError(
                f"data.chat_template: {place} is a list of messages, but the "
                "tokenizer has no chat template; name a Jinja file"
            )
        for index, message in enumerate(messages):
            match str(message.get("role")):
                case "user" | "assistant":
                    pass
                case "tool":
                    self._template.require_tool_results()
                case role:
                    self._template.require_role(role, is_first=index == 0 and not is_reply)
        return self._template

    def _encoded(self, text: str, messages: Sequence[Message], place: str) -> tuple[int, ...]:
        token_ids, media = self.encode_text(text), media_of(messages, place)
        if self._vision is not None:
            return self._vision.expand(token_ids, media, place)
        if media:
            raise ConfigError(f"model.path: {place} has images, and the model sees none")
        return token_ids


def _place(prompt: Prompt) -> str:
    return prompt.origin or "a prompt"


def _described(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Sequence[Message]:
    """The messages with the tools described in the system message."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"You may call these tools:\n<tools>\n{schemas}\n</tools>"
    first, rest = messages[:1], messages[1:]
    if not first or first[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first[0], "content": f"{first[0]['content']}\n\n{text}"}, *rest]


def _template(tokenizer: PreTrainedTokenizerBase, data: DataSettings) -> ChatTemplate | None:
    match data.chat_template:
        case "none":
            return None
        case "native":
            return ChatTemplate(tokenizer) if tokenizer.chat_template else None
        case Path() as path:
            return ChatTemplate(tokenizer, read_text(path, "data.chat_template"))
