"""From rows to prompts: which columns hold the prompt, its answer and its media, and templates.
Rows come from files or from a user's PATH.py:NAME.

Invariant: every row of a file is checked when its source is opened, or by the launch of the run, so
no row can end a run that has begun. Images and videos are read when the row is sampled, and rows of
a user's source are checked as they are read.

A row has images and videos in the content parts of its messages, or in columns (`data.image_key`,
`data.video_key`). A marker <image> or <video> in the text says where each belongs; without markers
they come before the text of the first user message.
"""

import inspect
import itertools
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.rendering.messages import normalized, template_errors
from streamrl.config.data import DataSettings, SourceSettings
from streamrl.data_files import Row, RowSource, as_json_values, shown, value_of_text
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.interfaces import Message, Prompt
from streamrl.user_code import attributed_to, load_user_code
from streamrl.vision.parts import has_media, is_medium, paths_in

_MARKERS = {"<image>": "image", "<video>": "video"}
_SPLIT = re.compile("(<image>|<video>)")
_JINJA = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=lambda value: _written(value)
)


def for_teachers(template: str, prompt: Prompt) -> Prompt:
    """The prompt as teachers of `algorithm.distillation` read it.

    Raises:
        RolloutError: the template cannot be rendered.
    """
    content = prompt.content
    if isinstance(content, str):
        return replace(prompt, content=_taught(template, prompt, content))
    asked = [i for i, message in enumerate(content) if message["role"] == "user"]
    if not asked:
        raise RolloutError("algorithm.distillation.template: the prompt has no message of the user")
    last = content[asked[-1]]
    shown = {**last, "content": _taught(template, prompt, text_of(last["content"]))}
    return replace(prompt, content=(*content[: asked[-1]], shown, *content[asked[-1] + 1 :]))


def _taught(template: str, prompt: Prompt, text: str) -> str:
    # Without an expected answer the row's own `answer` is used, if any: an empty one would be no
    # hint.
    answer = {"answer": prompt.answer} if prompt.answer else {}
    try:
        return _render(template, {**prompt.row, "prompt": text, **answer})
    except ValueError as error:
        raise RolloutError(f"algorithm.distillation.template: {error}") from error


@runtime_checkable
class PromptRows(Protocol):
    """A finite set of prompts, by their number from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))


class MediaColumns:
    """The columns of a file that hold media, by their kind."""

    def __init__(self, data: DataSettings, source: SourceSettings) -> None:
        keys = {"image": data.image_key, "video": data.video_key}
        self.keys = {kind: key for kind, key in keys.items() if key is not None}
        self._folder = Path(source.path).parent
        self._system_prompt = data.system_prompt

    def fill(self, prompt: Prompt) -> Prompt:
        """Put the media of these columns into the messages of a row's prompt.

        Raises:
            ConfigError: a column holds something else, does not fit the markers, or a file is not
                there.
        """
        columns = {kind: self._values(prompt, kind, key) for kind, key in self.keys.items()}
        if any(columns.values()):
            messages, system = prompt.content, self._system_prompt
            if isinstance(messages, str):
                opening = [{"role": "system", "content": system}] if system else []
                messages = (*opening, {"role": "user", "content": messages})
            content = with_columns(messages, columns, prompt.origin)
            prompt = replace(prompt, content=content)
        if isinstance(prompt.content, str) or not has_media(prompt.content):
            return prompt
        try:
            for name in paths_in(prompt.content, prompt.origin):
                # os.path, since pathlib raises for names that are too long, such as base64 without
                # "data:".
                if not os.path.isfile(path := str(self._folder / name)):
                    raise ConfigError(f"{prompt.origin}: there is no file {path[:200]}")
        except RolloutError as error:
            raise ConfigError(str(error)) from error
        return replace(prompt, folder=self._folder)

    def _values(self, prompt: Prompt, kind: str, key: str) -> Sequence[Any]:
        value = column(prompt, key)
        if value is None:
            return ()
        if isinstance(value, list):
            return value
        if kind == "video":
            raise ConfigError(f"{prompt.origin}: {key} was {shown(value)}; it must be a list")
        return (value,)


class RowColumns:
    """How the rows of one source become prompts; keys that the source does not set come from
    `data`.

    Args:
        setting: the setting that names the source; errors begin with it.
        default_name: the source's name for rows that name none.
    """

    def __init__(
        self, data: DataSettings, setting: str, source: SourceSettings, default_name: str
    ) -> None:
        self.setting = setting
        self.prompt_key = source.prompt_key or data.prompt_key
        self.answer_key = source.answer_key or data.answer_key
        template = source.prompt_template
        self.template = data.prompt_template if template is None else template
        self.data_source_key = data.data_source_key
        self.name, self.default_name = source.name, default_name
        self.media = MediaColumns(data, source)

    def check(self, row: Row, path: str) -> None:
        """
        Raises:
            ConfigError: the first row lacks a column that all must have.
        """
        keys = {"prompt": None if self.template else self.prompt_key, "answer": self.answer_key}
        keys |= self.media.keys
        taken = {key for key in keys.values() if key is not None}
        for name, key in keys.items():
            if key is not None and _value(row.fields, key) is _MISSING:
                hint = did_you_mean(key, row.fields.keys() - taken or row.fields)
                known = "reward_model.ground_truth"
                if name == "answer" and _value(row.fields, known) is not _MISSING:
                    hint = f"did you mean {known!r}?"
                elif name == "answer":
                    hint += "; or set null, if no reward needs an answer"
                raise ConfigError(f"data.{name}_key: {path} has no column {key!r}; {hint}")

    def prompt(self, row: Row) -> Prompt:
        """
        Raises:
            ConfigError: the row has no prompt or no answer, or its prompt is no valid Unicode.
        """
        content = self._rendered(row) if self.template else self._content(row)
        self._require_unicode(content, row)
        prompt = Prompt(content, self._answer(row), self._named(row.fields), row.place)
        return self.media.fill(prompt)

    def _content(self, row: Row) -> str | tuple[Message, ...]:
        value = self._required(row, self.prompt_key)
        content = _content(value)
        if not content or (isinstance(content, str) and not content.strip()):
            raise ConfigError(
                f"{self.setting}: {row.place}: {self.prompt_key} was {shown(value)}; it must be "
                "text, or a list of messages that have a role and a content; else set "
                "data.prompt_template"
            )
        return content

    def _require_unicode(self, content: str | tuple[Message, ...], row: Row) -> None:
        contents = [content] if isinstance(content, str) else [m["content"] for m in content]
        for text in map(text_of, contents):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{self.setting}: {row.place}: the prompt has {text[error.start]!a}, half a "
                    "surrogate pair"
                ) from error

    def _rendered(self, row: Row) -> str | tuple[Message, ...]:
        try:
            if isinstance(self.template, str):
                return _render(self.template, row.fields)
            return tuple(
                {"role": m.role, "content": _render(m.content, row.fields)}
                for m in self.template or ()
            )
        except ValueError as error:
            raise ConfigError(
                f"data.prompt_template: it cannot render {row.place}: {error}"
            ) from error

    def _answer(self, row: Row) -> str:
        if self.answer_key is None:
            return ""
        answer = self._required(row, self.answer_key)
        if isinstance(answer, str):
            return answer
        place = f"{self.setting}: {row.place}: {self.answer_key}"
        if answer is None or (isinstance(answer, float) and math.isnan(answer)):
            raise ConfigError(f"{place} was {answer}; it must have a value")
        try:
            text = json.dumps(answer)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{place} was {shown(answer)}; it must be text, a number, or lists and records "
                f"of them ({error})"
            ) from error
        return _written(answer) if isinstance(answer, int | float) else text

    def _required(self, row: Row, key: str) -> Any:
        value = _value(row.fields, key)
        if value is _MISSING:
            raise ConfigError(
                f"{self.setting}: {row.place} lacks {key!r}; it has {', '.join(row.fields)}"
            )
        return value

    def _named(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        name = self.name or ("" if self.data_source_key in fields else self.default_name)
        return {**fields, self.data_source_key: name} if name else fields


class RowPrompts:
    """The prompts of the rows of files.

    Args:
        num_checked: how many rows, from the first on, are checked now; None: all.

    Raises:
        ConfigError: one of these rows has no prompt or no answer.
    """

    def __init__(
        self, rows: RowSource, columns: RowColumns, path: str, num_checked: int | None = None
    ) -> None:
        self._rows, self._columns = rows, columns
        columns.check(rows[0], path)
        for _ in itertools.islice(self, num_checked):
            pass

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Prompt:
        return self._columns.prompt(self._rows[number])

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._columns.prompt, self._rows)


class UserPrompts:
    """The stream of a user's PATH.py:NAME; what it raises and returns is checked.

    Raises:
        ConfigError: its first prompt is not a `Prompt`.
    """

    def __init__(self, name: str, source: Any) -> None:
        self._name, self._source = name, source
        self[0]

    def __getitem__(self, prompt_index: int) -> Prompt:
        with attributed_to(f"{self._name}: prompt {prompt_index}"):
            prompt = self._source[prompt_index]
        if not isinstance(prompt, Prompt):
            raise ConfigError(
                f"{self._name}: prompt {prompt_index} was {type(prompt).__name__}; it must be a "
                "streamrl.interfaces.Prompt"
            )
        return prompt


class UserDataSet(PromptRows):
    """The data set of a user's PATH.py:NAME, whose rows are checked as they are read.

    Raises:
        ConfigError: it has no rows, or its first row has no prompt or no answer.
    """

    def __init__(self, name: str, source: Any, columns: RowColumns) -> None:
        self._name, self._source, self._columns = name, source, columns
        with attributed_to(name):
            self._size = len(source)
        if not self._size:
            raise ConfigError(f"{name}: holds no rows")
        self[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Prompt:
        place = f"row {number + 1} of {self._name.rpartition(':')[2]}"
        with attributed_to(f"{self._name}: row {number + 1}"):
            row = self._source[number]
        if isinstance(row, Prompt):
            return row
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{self._name}: row {number + 1} was {type(row).__name__}; it must be a mapping or "
                "a streamrl.interfaces.Prompt"
            )
        read = Row(as_json_values(row), place)
        if not number:
            self._columns.check(read, self._name)
        return self._columns.prompt(read)


class ConcatenatedPrompts(PromptRows):
    """Several sets of prompts, one after the other, at most `limit` of each."""

    def __init__(self, parts: Sequence[PromptRows], limit: int | None = None) -> None:
        self._parts = parts
        sizes = (len(part) if limit is None else min(limit, len(part)) for part in parts)
        self._ends = tuple(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Prompt:
        part, own_number = self.place(number)
        return self._parts[part][own_number]

    def place(self, number: int) -> tuple[int, int]:
        """The part that has this number, and the number within it."""
        if number >= len(self):
            raise IndexError(f"there are {len(self)} prompts, and not one numbered {number}")
        part = bisect_right(self._ends, number)
        return part, number - (self._ends[part - 1] if part else 0)


def open_user_source(
    field: str, entry: str, kwargs: Mapping[str, Any], seed: int, columns: RowColumns
) -> UserPrompts | UserDataSet:
    """Open a user's PATH.py:NAME, which is called with the source's arguments, and with the seed if
    it takes one. It returns a stream, whose `__getitem__` is a pure function of the prompt index,
    or, if it also has a `__len__`, a data set, whose rows (mappings, or `Prompt`s) are read like
    those of a file.

    Args:
        field: the setting that names it; errors begin with it.

    Raises:
        ConfigError: no such file or name, it does not take the arguments, or its first prompt
            cannot be used.
    """
    name = f"{field}: {entry}"
    make = load_user_code(field, entry)
    with attributed_to(name):
        parameters = inspect.signature(make).parameters.values()
        takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
        arguments = {"seed": seed, **kwargs} if takes_seed else kwargs
        source = make(**arguments)
    if isinstance(source, Sized):
        return UserDataSet(name, source, columns)
    return UserPrompts(name, source)


def column(prompt: Prompt, key: str) -> Any:
    """The value of a column of the prompt's row; a dot reaches into it. None if it is missing."""
    value = _value(prompt.row, key)
    return None if value is _MISSING else value


def _render(template: str, values: Mapping[str, Any]) -> str:
    with template_errors():
        return _compiled(template).render(values)


_compiled = cache(_JINJA.from_string)


_MISSING = object()


def _value(fields: Any, key: str) -> Any:
    """Look up a column. Its name may contain dots, which reach into records, lists (by a number,
    from 0) and text that `value_of_text` reads."""
    if isinstance(fields, str):
        fields = value_of_text(fields)
    if isinstance(fields, list | tuple):
        fields = {str(place): value for place, value in enumerate(fields)}
    if not isinstance(fields, Mapping):
        return _MISSING
    if key in fields:
        return fields[key]
    first, _, rest = key.partition(".")
    return _value(fields.get(first), rest) if rest else _MISSING


def _content(value: Any) -> str | tuple[Message, ...]:
    """The prompt's text or messages, which may be JSON or Python text; empty if the value is
    neither."""
    if isinstance(value, str):
        read = value_of_text(value) if value.lstrip().startswith("[") else None
        if not (isinstance(read, list) and read and all(map(_is_message, read))):
            return value
        value = read
    messages = value if isinstance(value, list) and all(map(_is_message, value)) else ()
    return tuple(map(normalized, messages))


def _written(answer: Any) -> str:
    """A number as people write it, without an exponent."""
    is_usual = isinstance(answer, float) and 1e-20 < abs(answer) < 1e20
    return format(Decimal(repr(float(answer))), "f") if is_usual else str(answer)


def _is_message(turn: Any) -> bool:
    if not (isinstance(turn, dict) and isinstance(turn.get("role"), str)):
        return False
    content, calls = turn.get("content"), turn.get("tool_calls")
    # Tool calls need no accompanying text.
    return is_content(content) or (content is None and isinstance(calls, list) and any(calls))


def is_content(value: Any) -> bool:
    """Whether a message may have this content: a text, or parts that are texts, images or
    videos."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and all(is_medium(part) or _text(part) is not None for part in value)
    )


def text_of(content: Any) -> str:
    """The text parts of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(_text(part) or "" for part in content)


def with_columns(
    messages: Sequence[Message], columns: Mapping[str, Sequence[Any]], place: str
) -> tuple[Message, ...]:
    """The messages with the media of the image and video columns in their places.

    Raises:
        ConfigError: a message has more or fewer markers than there are media.
    """
    texts = [m["content"] for m in messages if isinstance(m["content"], str)]
    counts = {k: sum(text.count(marker) for text in texts) for marker, k in _MARKERS.items()}
    for kind, values in columns.items():
        if counts[kind] not in (0, len(values)):
            raise ConfigError(
                f"{place} has {counts[kind]} markers <{kind}> and {len(values)} of data.{kind}_key"
            )
    queues = {kind: iter(values) for kind, values in columns.items()}
    marked = [_with_markers(message, queues) for message in messages]
    unmarked = [
        {"type": kind, kind: value}
        for kind, values in columns.items()
        if not counts[kind]
        for value in values
    ]
    if unmarked:
        users = (i for i, m in enumerate(marked) if m.get("role") == "user")
        first = next(users, len(marked) - 1)
        content = marked[first]["content"]
        rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
        marked[first] = {**marked[first], "content": [*unmarked, *rest]}
    return tuple(marked)


def _with_markers(message: Message, queues: Mapping[str, Iterator[Any]]) -> Message:
    content = message["content"]
    if not isinstance(content, str) or not _SPLIT.search(content):
        return message
    parts = []
    for piece in filter(None, _SPLIT.split(content)):
        # A marker of a kind that has no column is plain text.
        kind = _MARKERS.get(piece, "text")
        kind, value = (kind, next(queues[kind])) if kind in queues else ("text", piece)
        parts.append({"type": kind, kind: value})
    return {**message, "content": parts}


def _text(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
