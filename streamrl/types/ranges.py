"""The ranges of numbers and names that cross a process, checked wherever a record is decoded.

Invariant: a number in range fits wherever it is kept (64 bits of SQLite, 53 of a Lua number), and
so does what is counted up from it. A limit is far above what a run needs and far below what a
process can bear.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

MAX_NAME = 256
MAX_TEXT = 4096
MAX_NAMES = 16_384
MAX_GROUPS = 2**20
MAX_WAIT_S = 86_400.0

PolicyVersion: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Also that of a token, an int32."""
PromptIndex: TypeAlias = Annotated[int, Meta(ge=0, le=2**52)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**52)]
CountOrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=2**52)]
"""-1 where it is not known."""
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
