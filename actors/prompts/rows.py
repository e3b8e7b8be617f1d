"""From rows to prompts: which columns hold the prompt and its answer, and what a template makes.

Invariant: every row is checked when its source is opened, so none ends a run that has begun.
"""

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any, Protocol, runtime_checkable

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.prompts.media import MediaColumns, is_content, text_of
from actors.rendering.messages import normalized, template_errors
from streamrl.config.data import DataSettings, MessageTemplate, SourceSettings
from streamrl.data_files import Row, RowSource, shown
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.interfaces import Message, Prompt

_PROMPT = "it must be text, or a list of messages that have a role and a content"
_JINJA = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=lambda value: _written(value)
)


def for_teachers(template: str, prompt: Prompt) -> Prompt:
    """The prompt as the teachers of `algorithm.distillation` read it.

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
    # Without an expected one the row's own, if it has one: an empty hint would be none.
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

    def __iter__(self) -> Iterator[Prompt]: ...


@dataclass(frozen=True)
class RowColumns:
    """How the rows of one source become prompts."""

    setting: str
    """The one that names the source; errors begin with it."""
    prompt_key: str
    answer_key: str | None
    template: str | tuple[MessageTemplate, ...] | None
    data_source_key: str
    name: str
    """Replaces `data_source_key` of each row."""
    default_name: str
    """Stands for it where a row has none."""
    media: MediaColumns

    @classmethod
    def of(
        cls, data: DataSettings, setting: str, source: SourceSettings, default_name: str
    ) -> "RowColumns":
        """Of one source; what it leaves open is as in `data`."""
        template = source.prompt_template
        return cls(
            setting,
            source.prompt_key or data.prompt_key,
            source.answer_key or data.answer_key,
            data.prompt_template if template is None else template,
            data.data_source_key,
            source.name,
            default_name,
            MediaColumns.of(data, source),
        )

    def check(self, row: Row, path: str) -> None:
        """
        Raises:
            ConfigError: the first row lacks a column that all must have.
        """
        keys = {"prompt_key": None if self.template else self.prompt_key}
        for name, key in {**keys, "answer_key": self.answer_key, **self.media.settings}.items():
            if key is not None and _value(row.fields, key) is _MISSING:
                hint = did_you_mean(key, row.fields)
                known = "reward_model.ground_truth"
                if name == "answer_key" and _value(row.fields, known) is not _MISSING:
                    hint = f"did you mean {known!r}?"
                raise ConfigError(f"data.{name}: {path} has no column {key!r}; {hint}")

    def prompt(self, row: Row) -> Prompt:
        """
        Raises:
            ConfigError: the row has no prompt or no answer, or a prompt that is no valid Unicode.
        """
        content = self._rendered(row) if self.template else self._content(row)
        self._require_unicode(content, row)
        prompt = Prompt(content, self._answer(row), self._named(row.fields), row.place)
        return self.media.fill(prompt)

    def _content(self, row: Row) -> str | tuple[Message, ...]:
        value = self._required(row, self.prompt_key)
        content = _content(value)
        if not content:
            place = f"{self.setting}: {row.place}: {self.prompt_key}"
            raise ConfigError(f"{place} was {shown(value)}; {_PROMPT}")
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
            assert self.template is not None, "asked by the caller"
            return tuple(
                {"role": m.role, "content": _render(m.content, row.fields)} for m in self.template
            )
        except ValueError as error:
            raise ConfigError(
                f"data.prompt_template: it cannot render {row.place}: {error}"
            ) from error

    def _answer(self, row: Row) -> str:
        if self.answer_key is None:
            return ""
        answer = self._required(row, self.answer_key)
        place = f"{self.setting}: {row.place}: {self.answer_key}"
        if answer is None or (isinstance(answer, float) and math.isnan(answer)):
            raise ConfigError(f"{place} was {answer}; it must have a value")
        try:
            text = json.dumps(answer, default=_unpacked)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{place} was {shown(answer)}; it must be text, a number, or lists and records "
                f"of them ({error})"
            ) from error
        return _written(answer) if isinstance(answer, str | int | float) else text

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

    Raises:
        ConfigError: a row has no prompt or no answer.
    """

    def __init__(self, rows: RowSource, columns: RowColumns, path: str) -> None:
        self._rows, self._columns = rows, columns
        columns.check(rows[0], path)
        for _ in self:
            pass

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Prompt:
        return self._columns.prompt(self._rows[number])

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._columns.prompt, self._rows)


class ConcatenatedPrompts:
    """Several sets of prompts, one after the other; of each no more than `limit`."""

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
        """The part that has this number, and which of its own numbers it is."""
        if number >= len(self):
            raise IndexError(f"there are {len(self)} prompts, and not one numbered {number}")
        part = bisect_right(self._ends, number)
        return part, number - (self._ends[part - 1] if part else 0)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))


def column(prompt: Prompt, key: str) -> Any:
    """The value of a column of the prompt's row, which a dot may reach into; None without it."""
    value = _value(prompt.row, key)
    return None if value is _MISSING else value


def _render(template: str, values: Mapping[str, Any]) -> str:
    """
    Raises:
        ValueError: it cannot be rendered.
    """
    with template_errors():
        return _compiled(template).render(values)


@cache
def _compiled(template: str) -> Template:
    return _JINJA.from_string(template)


_MISSING = object()


def _value(fields: Any, key: str) -> Any:
    """A column may have a dot in its name; a number behind a dot is a place in a list, from 0."""
    if isinstance(fields, list | tuple):
        fields = {str(place): value for place, value in enumerate(fields)}
    if not isinstance(fields, Mapping):
        return _MISSING
    if key in fields:
        return fields[key]
    first, _, rest = key.partition(".")
    return _value(fields.get(first), rest) if rest else _MISSING


def _content(value: Any) -> str | tuple[Message, ...]:
    """The prompt's text or messages; empty if the value is neither."""
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list) and all(map(_is_message, value)) else ()
    return tuple(map(normalized, messages))


def _is_call(turn: Mapping[str, Any]) -> bool:
    """Calls of tools need no text beside them."""
    calls = turn.get("tool_calls")
    return turn.get("content") is None and isinstance(calls, list) and any(calls)


def _written(answer: Any) -> str:
    """A number without an exponent, as people write it."""
    is_usual = isinstance(answer, float) and 1e-20 < abs(answer) < 1e20
    return format(Decimal(repr(float(answer))), "f") if is_usual else str(answer)


def _unpacked(value: Any) -> Any:
    """An array or a number of numpy or torch as a plain one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _is_message(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and (is_content(turn.get("content")) or _is_call(turn))
    )
