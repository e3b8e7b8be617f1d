"""Columns whose records and lists were written as text.

'{"inputs": ...}', '["assert ..."]'      JSON, also JSON within JSON
"{'inputs': ...}", "['assert ...']"      what Python prints, as in CSV files
'eJx...'                                 LiveCodeBench: JSON, pickled, zlib, base64
"""

import ast
import base64
import binascii
import io
import json
import pickle
import warnings
import zlib
from contextlib import suppress
from typing import Any

_MOST = 4
_BEGINNINGS = ("{", "[", "(", '"', "'")
# How zlib data begins in base64.
_ZLIB = "eJ"


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
    if not text.startswith(_BEGINNINGS):
        return None
    for read in (json.loads, _literal):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return None


def _literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


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
