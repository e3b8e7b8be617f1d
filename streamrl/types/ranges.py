"""The ranges of numbers and names that cross a process, checked wherever a record is decoded.

Invariant: a number in range fits wherever it is stored (64 bits in SQLite, 53 in JSON), and so do
sums of it. Limits are far above what a run needs and far below what a process can bear.

An id that comes from outside (a command line, an environment, another process) is safe as one
component of a path, and one short word in a log. Runs and generators are named by ids.
"""

import re
import socket
from typing import Annotated, TypeAlias

from msgspec import Meta

MAX_NAME = 256
MAX_TEXT = 4096
MAX_NAMES = 4096
MAX_GROUPS = 2**20
MAX_WAIT_S = 86_400.0
MAX_COUNT = 2**52
MAX_VERSION = 2**31 - 1

PolicyVersion: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
"""Also that of a token, an int32."""
PromptIndex: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CountOrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""-1 if unknown."""
SiblingNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_NAMES)]
"""A sibling's place in its group, from 0 on."""
NumGroups: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_GROUPS)]
Finite: TypeAlias = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Neither NaN nor infinite."""
NotNegative: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e300)]
WaitSeconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f]+$")
]
"""An id; it stands in one line of a log."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]


ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_ID = re.compile(ID_PATTERN.removesuffix("$"))


def check_id(field: str, value: str) -> str:
    """Check that the value may be an id, and return it.

    Args:
        field: what the error begins with.

    Raises:
        ValueError: it is empty or too long, has a character that is not allowed, or does not begin
        with a letter or digit.
    """
    if _ID.fullmatch(value) is None:
        short = value if len(value) <= 60 else value[:57] + "..."
        raise ValueError(
            f"{field}: was {short!r}; it must be 1 to 128 letters, digits, '.', '_' or '-', with a "
            "letter or digit first"
        )
    return value


def named_after_host(value: str) -> str:
    """The value with {host} replaced by the host's name, so that replicas of one command, such as
    containers and pods, have different ids, which outlive their processes."""
    return value.replace("{host}", socket.gethostname())
