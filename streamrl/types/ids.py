"""The form of every id that comes from outside: a command line, an environment, another process.

Invariant: an id that has it is one part of a path below any folder, and one short word in a log.
Runs and generators are named by ids.
"""

import re
import socket

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_ID = re.compile(ID_PATTERN.removesuffix("$"))


def check_id(field: str, value: str) -> str:
    """The value, if it may be an id.

    Args:
        field: what the sentence of the error begins with.

    Raises:
        ValueError: another character, an empty or a long one, or no letter or digit first.
    """
    if _ID.fullmatch(value) is None:
        raise ValueError(
            f"{field}: was {_shortened(value)!r}; it must be 1 to 128 letters, digits, '.', '_' or "
            "'-', with a letter or digit first"
        )
    return value


def named_after_host(value: str) -> str:
    """The value with the host's name for {host}: replicas of one command, as containers and pods
    are, have ids of their own, which outlive their processes."""
    return value.replace("{host}", socket.gethostname())


def _shortened(value: str) -> str:
    return value if len(value) <= 60 else value[:57] + "..."
