"""What a text holds: fenced blocks of code, and records and lists that were written as text.

'{"inputs": ...}', '["assert ..."]'      JSON, also JSON within JSON
"{'inputs': ...}", "['assert ...']"      what Python prints, as in CSV files
'eJx...'                                 LiveCodeBench: JSON, pickled, zlib, base64
"""

import base64
import binascii
import io
import pickle
import re
import zlib
from typing import Any

from streamrl.data_files import value_of_text

# A mark in the middle of a line, such as in a text in the code, does not end the block.
_BLOCK = re.compile(
    r"(?:^([ \t]+))?```[ \t]*+([^\s`]*+)[^\n`]*\n(.*?)(?:^[ \t]*```|```[ \t\r]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_MOST = 4
_BEGINNINGS = ("{", "[", "(", '"', "'")
# How zlib data begins in base64.
_ZLIB = "eJ"


def blocks(text: str) -> list[tuple[str, str]]:
    """The code blocks of a text: the language that each names, and its code, unindented as far as
    its mark is indented.

    >>> blocks("1. So:\\n   ```py\\n   print('```')\\n   ```")
    [('py', "print('```')\\n")]
    """
    found: list[tuple[str, str, str]] = _BLOCK.findall(text)
    return [(language, _as_far_left(code, indent)) for indent, language, code in found]


def _as_far_left(code: str, indent: str) -> str:
    """As it is where a line of it stands further to the left."""
    lines = code.split("\n")
    if any(line.strip() and not line.startswith(indent) for line in lines):
        return code
    return "\n".join(line.removeprefix(indent) for line in lines)


def decoded(value: Any) -> Any:
    """The record or list that a text encodes; any other text or value unchanged.

    >>> decoded('"[1]"'), decoded("{'a': (1, 2)}"), decoded("42"), decoded("assert f(1)")
    ([1], {'a': (1, 2)}, '42', 'assert f(1)')
    """
    for _ in range(_MOST):
        if not isinstance(value, str):
            break
        inner = _read(value.strip())
        if not isinstance(inner, dict | list | tuple | str):
            break
        value = inner
    return value


def _read(text: str) -> Any:
    """What a text encodes; None if it is just a text."""
    if text.startswith(_ZLIB):
        return _unpacked(text)
    return value_of_text(text) if text.startswith(_BEGINNINGS) else None


def _unpacked(text: str) -> Any:
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return _Unpickler(io.BytesIO(packed)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError):
        return None


class _Unpickler(pickle.Unpickler):
    """Unpickles plain values only, so it runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")
