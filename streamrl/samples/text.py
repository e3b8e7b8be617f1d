"""Texts that a model wrote, safe to show: a terminal obeys control characters, a person does not
see them."""

import re

# C0 and C1 controls, DEL, line separators, marks that turn the direction of text, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def printable(text: str) -> str:
    r"""The text with its control characters as escapes, but for line ends and tabs.

    >>> printable("red: \x1b[31m, bell: \x07")
    'red: \\x1b[31m, bell: \\x07'
    """
    return _UNSAFE.sub(lambda found: _escape(found.group()), text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
