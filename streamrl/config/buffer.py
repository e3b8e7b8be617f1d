"""`buffer`: where trajectory groups wait, and how old they may become."""

from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from streamrl.config.addresses import is_loopback
from streamrl.config.numbers import NotNegative, Positive, Seconds
from streamrl.config.section import Section


class BufferSettings(Section):
    """Where trajectory groups wait between generators and learner."""

    url: str = "zmq://127.0.0.1:0"
    """zmq://host:port, where port 0 lets `streamrl launch` pick a free one; redis://, rediss://,
    redis+sentinel://host,host/service, redis+cluster://host,host or rediss+cluster://, with
    user:password@ before the host; or memory://."""
    max_staleness: NotNegative = 2
    """Versions a group may be behind when it is trained; 0 is the synchronous algorithm."""
    overdue: Literal["wait", "train", "drop"] = "wait"
    """What happens to a group that others overtake until it would be too old: `wait`, the learner
    waits for it, and `max_staleness` is exact; `train`, it is trained as old as it is, and
    `max_staleness` bounds only how far generators run ahead; `drop`, it is dropped, which trains
    fewer long responses than were sampled."""
    lease_ttl_s: Seconds = 30.0
    """A generator that sends no heartbeat for this long loses its leases."""
    max_group_bytes: Positive = 64 * 2**20
    """Largest group accepted, in bytes."""
    deadline_s: Seconds = 60.0
    """How long a client retries a call to the buffer before it fails."""
    journal: bool = True
    """Whether zmq:// keeps its state in the run folder (buffer/journal.sqlite)."""
    durability: Literal["process", "machine"] = "process"
    """What the journal survives: a killed buffer, or (one fsync a commit) a power failure too."""
    curve: Path | None = None
    """Folder of the keys (`streamrl keys new`) that zmq:// and `weights.address` need on any but a
    loopback address; on a loopback one they are used if it is set."""

    @field_validator("url")
    @classmethod
    def _has_known_scheme(cls, url: str) -> str:
        if not url.startswith(_BUFFER_SCHEMES):
            raise ValueError(f"was {url!r}; it must start with {', '.join(_BUFFER_SCHEMES)}")
        return url

    @model_validator(mode="after")
    def _has_keys(self) -> "BufferSettings":
        if self.url.startswith("zmq://") and self.curve is None and not is_loopback(self.url):
            raise ValueError(
                f"buffer.url: was {self.url!r}, which other machines can reach; that needs keys: "
                "make them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
            )
        return self

    @property
    def has_daemon(self) -> bool:
        """Whether a process of ours serves the buffer."""
        return self.url.startswith("zmq://")


_BUFFER_SCHEMES = (
    *("memory://", "zmq://", "redis://", "rediss://"),
    *("redis+sentinel://", "redis+cluster://", "rediss+cluster://"),
)
