"""What the launcher has of the files that grow on hosts, and what the hosts send of them.

Invariant: a part is written at its own offset, so what is sent twice changes nothing; see
`streamrl.cli.launchers.ssh.agent.growing`.
"""

from collections.abc import Sequence
from pathlib import Path

from streamrl.cli.launchers.ssh.frames import Part


def sizes_of(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """What the launcher has of the logs; records may have been cut since, and are sent whole."""
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in found
        if path.suffix == ".log"
    }


def write_part(folder: Path, part: Part, body: bytes) -> None:
    """Write what a host has sent; its last part ends the file.

    Raises:
        OSError: it cannot be written.
        ValueError: the path leads out of the folder.
    """
    path = folder / part.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"a host sent {part.path!r}, which is not below {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(part.offset)
        file.write(body)
        if part.is_last:
            file.truncate()
