"""A user's own tools: a function, or a class that is instantiated for each episode.

A class has a method `call(self, **arguments)` and optionally `close(self)`, each async or not; what
an instance keeps is the state of one episode.

Its OpenAI schema comes from its signature and docstring, from a file, or from the settings.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import yaml

from actors.concurrency import Threads
from actors.tools import ToolError, ToolSession, name_of
from streamrl.config.generator import CallLimits, ToolSettings
from streamrl.errors import ConfigError, RolloutError, read_text
from streamrl.interfaces import ToolSchema
from streamrl.user_code import attributed_to, load_user_code

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


def schema_of(function: Callable[..., Any], setting: str) -> ToolSchema:
    """
    Raises:
        ConfigError: the function lacks a type hint, or its docstring a description.
    """
    # It takes seconds to import, and is needed only if no schema is given.
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: ToolSchema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise ConfigError(
            f"{setting}: {error}; a tool has a type hint for each argument and a docstring with "
            "what it does and an `Args:` section, or a function_schema"
        ) from error
    return schema


def read_schema(given: Mapping[str, Any] | Path, setting: str) -> ToolSchema:
    """Read a schema that the configuration contains, or that is in a file.

    Raises:
        ConfigError: there is no such file, or it holds no function schema.
    """
    place = f"{setting}: {given}" if isinstance(given, Path) else setting
    if isinstance(given, Path):
        try:
            given = yaml.safe_load(read_text(given, setting))
        except yaml.YAMLError as error:
            raise ConfigError(f"{place}: is neither YAML nor JSON: {error}") from error
    given = given.get("tool_schema", given) if isinstance(given, Mapping) else given
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not _NAME.fullmatch(str(function.get("name", ""))):
        raise ConfigError(
            f"{place}: is no function schema, which is {{type: function, function: {{name, "
            "description, parameters}}"
        )
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    described = {"description": "", **function, "parameters": parameters}
    return {"type": "function", "function": described}


class UserTool:
    """The tool at PATH.py:NAME.

    Raises:
        ConfigError: it cannot be loaded, or no schema can be made for it.
    """

    def __init__(self, settings: ToolSettings, setting: str) -> None:
        self.limits: CallLimits = settings
        self._owner = f"{setting}.tool: {settings.tool}"
        self._loaded = load_user_code(f"{setting}.tool", settings.tool)
        self._is_class = inspect.isclass(self._loaded)
        self._kwargs = settings.kwargs
        if self._kwargs and not self._is_class:
            raise ConfigError(
                f"{setting}.kwargs: was {settings.kwargs!r}, and {settings.tool} is a function, "
                "whose arguments are the model's"
            )
        self.schemas = (self._make_schema(settings, setting),)
        self._threads = Threads(settings.tool.rpartition(":")[2])

    async def open(self) -> ToolSession:
        if not self._is_class:
            # State in a function's module is shared by all episodes.
            return _FunctionSession(self.schemas, self._loaded, self._threads)
        with attributed_to(self._owner, RolloutError):
            made = self._loaded(**self._kwargs)
        end = getattr(made, "close", None)
        return _FunctionSession(self.schemas, made.call, self._threads, end, has_state=True)

    def _make_schema(self, settings: ToolSettings, setting: str) -> ToolSchema:
        call: Any = getattr(self._loaded, "call", None)
        # If a schema is given, no signature is needed.
        is_method = callable if settings.function_schema is not None else inspect.isfunction
        if self._is_class and not is_method(call):
            raise ConfigError(f"{self._owner}: the class has no method call(self, ...)")
        if settings.function_schema is not None:
            return read_schema(settings.function_schema, f"{setting}.function_schema")
        if not self._is_class:
            return schema_of(self._loaded, self._owner)
        schema = schema_of(MethodType(call, self._loaded), self._owner)
        name = settings.tool.rpartition(":")[2]
        return {**schema, "function": {**schema["function"], "name": name}}


@dataclass(frozen=True)
class _FunctionSession:
    """One function for one episode, at the end of which `end` is called."""

    schemas: tuple[ToolSchema, ...]
    function: Callable[..., Any]
    threads: Threads
    end: Callable[[], Any] | None = None
    has_state: bool = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            raise ToolError(str(error)) from error
        if inspect.iscoroutinefunction(self.function):
            result = self.function(**arguments)
        else:
            try:
                result = await self.threads.run(partial(self._run, name, arguments))
            except RolloutError as error:
                raise ToolError(str(error)) from error
        if not inspect.isawaitable(result):
            return str(result)
        with attributed_to(name, ToolError):
            return as_text(await result)

    def _run(self, name: str, arguments: Mapping[str, Any]) -> object:
        """The function's result as text, or what is still to be awaited: a wrapper may return a
        coroutine without being one. Called in a thread."""
        with attributed_to(name, ToolError):
            result = self.function(**arguments)
            return result if inspect.isawaitable(result) else as_text(result)

    async def close(self) -> None:
        if self.end is None:
            return
        with attributed_to(name_of(self.schemas[0]), RolloutError):
            if inspect.isawaitable(closing := self.end()):
                await closing


def as_text(result: object) -> str:
    """A result as the policy reads it: text unchanged, anything else as JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, default=str, ensure_ascii=False)
