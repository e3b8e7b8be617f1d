"""What the launcher and the agent of a host say to each other, over the pipes of an ssh session.

A frame is one line of JSON; `num_bytes` raw bytes follow where it has them. What stands before the
first frame of an agent is what the host's shell printed.

Invariant: both ends are of one release; the agent names its release first, in `Hello`.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias, TypeVar

import msgspec

from streamrl.error_record import ErrorRecord
from streamrl.errors import TransportError

CHUNK_BYTES = 2**18
_FIRST = b'{"type":'
LINE_BYTES = 2**24


class _Frame(msgspec.Struct, frozen=True, tag=True):
    """`num_bytes` of a body follow."""

    num_bytes: int = 0


class Begin(_Frame, frozen=True):
    """To the agent, first: the host's name and address; it ends when nothing comes for
    `silence_s`."""

    host: str = ""
    address: str = ""
    silence_s: float = 120.0


class ReportedDevice(msgspec.Struct, frozen=True):
    """See `streamrl.placement.plan.Device`."""

    index: int
    memory_bytes: int
    name: str
    visible_as: str


class Hello(_Frame, frozen=True):
    """From the agent: its release and what the machine has; see `HostFacts`."""

    release: str = ""
    python: str = ""
    num_cores: int = 0
    devices: tuple[ReportedDevice, ...] = ()
    is_counted: bool = True
    interface: str = ""


class Join(_Frame, frozen=True):
    """To the agent: it works for the run in this folder, whose `launch.id` holds `launch_id` where
    the launcher sees the same folder. An older run there is moved aside, unless this one is its
    `resume`."""

    folder: str = ""
    launch_id: str = ""
    resume: bool = False


class Joined(_Frame, frozen=True):
    """From the agent: no other agent of this host works for the run. `shares_folder`: the launcher
    and the host see the same run folder."""

    shares_folder: bool = False


class Stat(msgspec.Struct, frozen=True):
    """A file as it is on the launching machine."""

    path: str
    size: int
    mtime_s: int


class Compare(_Frame, frozen=True):
    """To the agent: which of these files does the host not have like this?"""

    files: tuple[Stat, ...] = ()
    required: tuple[str, ...] = ()
    """Paths that have to be there, and are not copied."""


class Differing(_Frame, frozen=True):
    """From the agent: the answer to `Compare`."""

    paths: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Part(_Frame, frozen=True):
    """A part of a file, to the host or back to the launcher; the last one ends the file there."""

    path: str = ""
    offset: int = 0
    is_last: bool = False
    mode: int = 0o644
    mtime_s: int = 0


class Written(_Frame, frozen=True):
    """From the agent: every part that came before is on the host's disk."""


class Flush(_Frame, frozen=True):
    """To the agent: answer `Written`."""


class Gather(_Frame, frozen=True):
    """To the agent: send these files of the run folder, as they grow; `sizes` are what the launcher
    has of them. A `*` is any name in one folder."""

    patterns: tuple[str, ...] = ()
    sizes: dict[str, int] = {}


class Start(_Frame, frozen=True):
    """To the agent: start this command in the working folder; its output goes to the log."""

    name: str = ""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Ended(_Frame, frozen=True):
    """From the agent: the process has ended, and nothing of it is left."""

    name: str = ""
    exit_code: int = 0
    record: ErrorRecord | None = None


class Send(_Frame, frozen=True):
    """To the agent: this signal to the process."""

    name: str = ""
    signal: int = 0


class Beat(_Frame, frozen=True):
    """To the agent: the launcher is there."""


class Refused(_Frame, frozen=True):
    """From the agent: why it cannot do what it was told; it ends."""

    sentence: str = ""


ToAgent: TypeAlias = Begin | Join | Compare | Part | Flush | Gather | Start | Send | Beat
FromAgent: TypeAlias = Hello | Joined | Differing | Written | Part | Ended | Refused

T = TypeVar("T")


def encode(frame: _Frame, body: bytes = b"") -> bytes:
    """The frame's line, and its body."""
    if body:
        frame = msgspec.structs.replace(frame, num_bytes=len(body))
    return msgspec.json.encode(frame) + b"\n" + body


async def read_frame(
    reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[T], *, skips_text: bool = False
) -> tuple[T, bytes] | None:
    """The next frame and its body; None at the end. Waits for it without a limit. `skips_text`
    leaves out lines before it, which the host's shell has printed.

    Raises:
        TransportError: what came is no frame.
    """
    try:
        line = await reader.readline()
        while skips_text and line and not line.startswith(_FIRST):
            line = await reader.readline()
        if not line:
            return None
        frame = decoder.decode(line)
        num_bytes: int = getattr(frame, "num_bytes", 0)
        return frame, await reader.readexactly(num_bytes) if num_bytes else b""
    except asyncio.IncompleteReadError:
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransportError(f"no message of an agent: {line[:200]!r}") from error
