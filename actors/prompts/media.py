"""Images and videos of a data file's rows, put into the messages of their prompts.

A row has them in the content parts of its messages, or in columns (`data.image_key`,
`data.video_key`) with a marker <image> or <video> in the text where each stands; without markers
they stand before the text of the first user message.

Invariant: a row is checked when its file is opened, and its files are read when it is sampled.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamrl.config.data import DataSettings, SourceSettings
from streamrl.data_files import shown
from streamrl.errors import ConfigError
from streamrl.interfaces import Message, Prompt
from streamrl.vision.parts import has_media, is_medium, paths_in

_MARKERS = {"<image>": "image", "<video>": "video"}
_SPLIT = re.compile("(<image>|<video>)")


def is_content(value: Any) -> bool:
    """Whether a message may have it: a text, or parts that are texts, images or videos."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and all(is_medium(part) or _text(part) is not None for part in value)
    )


def text_of(content: Any) -> str:
    """What of a message's content is text."""
    if isinstance(content, str):
        return content
    return "".join(_text(part) or "" for part in content)


@dataclass(frozen=True)
class MediaColumns:
    """The columns of a file in `folder` that hold media, by their kind."""

    keys: Mapping[str, str]
    folder: Path
    system_prompt: str | None
    """Put before the user message that a string prompt with media becomes."""

    @classmethod
    def of(cls, data: DataSettings, source: SourceSettings) -> "MediaColumns":
        keys = {"image": data.image_key, "video": data.video_key}
        given = {kind: key for kind, key in keys.items() if key is not None}
        return cls(given, Path(source.path).parent, data.system_prompt)

    @property
    def settings(self) -> Mapping[str, str]:
        """The columns by the settings of `data` that name them."""
        return {f"{kind}_key": key for kind, key in self.keys.items()}

    def fill(self, prompt: Prompt) -> Prompt:
        """The prompt of a row with the media of these columns in its messages.

        Raises:
            ConfigError: a column is no list, does not fit the markers, or a file is not there.
        """
        columns = {kind: self._values(prompt, key) for kind, key in self.keys.items()}
        if any(columns.values()):
            messages = self._messages(prompt.content)
            content = with_columns(messages, columns, prompt.origin)
            prompt = replace(prompt, content=content)
        if isinstance(prompt.content, str) or not has_media(prompt.content):
            return prompt
        self._require_files(prompt)
        return replace(prompt, folder=self.folder)

    def _values(self, prompt: Prompt, key: str) -> Sequence[Any]:
        value = prompt.row.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise ConfigError(f"{prompt.origin}: {key} was {shown(value)}; it must be a list")
        return value

    def _messages(self, content: str | Sequence[Message]) -> Sequence[Message]:
        if not isinstance(content, str):
            return content
        user: Message = {"role": "user", "content": content}
        if not self.system_prompt:
            return (user,)
        return ({"role": "system", "content": self.system_prompt}, user)

    def _require_files(self, prompt: Prompt) -> None:
        assert not isinstance(prompt.content, str), "asked of messages"
        for name in paths_in(prompt.content):
            if not (self.folder / name).is_file():
                raise ConfigError(f"{prompt.origin}: there is no file {self.folder / name}")


def with_columns(
    messages: Sequence[Message], columns: Mapping[str, Sequence[Any]], place: str
) -> tuple[Message, ...]:
    """The messages with the media of the columns `image` and `video` in their places.

    Raises:
        ConfigError: a message has more or fewer markers than there are media.
    """
    counts = {kind: _count(messages, marker) for marker, kind in _MARKERS.items()}
    for kind, values in columns.items():
        if counts[kind] not in (0, len(values)):
            raise ConfigError(
                f"{place} has {counts[kind]} markers <{kind}> and {len(values)} of data.{kind}_key"
            )
    queues = {kind: iter(values) for kind, values in columns.items()}
    unmarked = [
        {"type": kind, kind: value}
        for kind, values in columns.items()
        if not counts[kind]
        for value in values
    ]
    marked = [_with_markers(message, queues) for message in messages]
    users = (i for i, m in enumerate(marked) if m.get("role") == "user")
    first = next(users, len(marked) - 1)
    return tuple(_led(m, unmarked) if i == first else m for i, m in enumerate(marked))


def _count(messages: Sequence[Message], marker: str) -> int:
    contents = (message["content"] for message in messages)
    return sum(content.count(marker) for content in contents if isinstance(content, str))


def _with_markers(message: Message, queues: Mapping[str, Iterator[Any]]) -> Message:
    content = message["content"]
    if not isinstance(content, str) or not _SPLIT.search(content):
        return message
    pieces = [piece for piece in _SPLIT.split(content) if piece]
    return {**message, "content": [_part(piece, queues) for piece in pieces]}


def _part(piece: str, queues: Mapping[str, Iterator[Any]]) -> Mapping[str, Any]:
    kind = _MARKERS.get(piece)
    if kind is None or kind not in queues:
        return {"type": "text", "text": piece}
    return {"type": kind, kind: next(queues[kind])}


def _led(message: Message, parts: Sequence[Mapping[str, Any]]) -> Message:
    if not parts:
        return message
    content = message["content"]
    rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*parts, *rest]}


def _text(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
