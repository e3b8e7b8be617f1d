"""The OpenAI schema of a function: from its signature and docstring, from a file, or as given."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from streamrl.errors import ConfigError
from streamrl.interfaces import ToolSchema

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


def schema_of(function: Callable[..., Any], setting: str) -> ToolSchema:
    """
    Raises:
        ConfigError: the function lacks a type hint, or its docstring a description.
    """
    # It takes seconds to load, and only a schema that is not given needs it.
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
    """A schema that the configuration gives, or that stands in a file.

    Raises:
        ConfigError: there is no such file, or it holds no function schema.
    """
    place = f"{setting}: {given}" if isinstance(given, Path) else setting
    if isinstance(given, Path):
        try:
            given = yaml.safe_load(given.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror}") from error
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


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments' names; "" for nothing."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""
