"""`buffer`: where trajectory groups wait, and how old they may become."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    Tag,
    field_validator,
    model_validator,
)

from streamrl.config.addresses import lacks_keys, require_places
from streamrl.config.secrets import (
    HIDDEN,
    REDIS_PASSWORD,
    hide_password,
    read_password,
    with_password,
)
from streamrl.config.section import Positive, Seconds, Section, Versions
from streamrl.errors import ConfigError

SHORTEST_LEASE_S = 1.0


class SteeredStaleness(Section):
    """A bound on staleness that follows the effective sample size."""

    min: Versions
    """The bound at first, and the lowest."""
    max: Versions
    """The highest; no older token is trained."""
    ess: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """The bound falls where the effective sample size is below this."""

    def contradictions(self) -> Iterator[str]:
        if self.min > self.max:
            yield f"""was min {self.min} and max {self.max}; min must be at most max (a fixed bound
                is an integer alone)"""


def _kind_of(value: Any) -> str:
    return "Steered" if isinstance(value, Mapping | SteeredStaleness) else "Fixed"


MaxStaleness = Annotated[
    Annotated[Versions, Tag("Fixed")] | Annotated[SteeredStaleness, Tag("Steered")],
    Discriminator(_kind_of),
]


class BufferSettings(Section):
    """Where groups wait between generators and learner."""

    url: str = "zmq://127.0.0.1:0"
    """zmq://host:port, where port 0 lets a launch pick one; redis://user@host, rediss://,
    redis+sentinel://host,host/service, redis+cluster://host,host, rediss+cluster://; or memory://.
    """
    password_file: Path | None = None
    """Password of redis://, unless STREAMRL_REDIS_PASSWORD has it."""
    max_staleness: MaxStaleness = 2
    """Versions that a group may be behind when it is trained; 0 is the synchronous algorithm. A
    record lets the learner steer it."""
    overdue: Literal["wait", "train", "drop"] = "wait"
    """Groups that others have overtaken until they are due: the learner waits for them, trains them
    late, beyond `max_staleness`, or drops them."""
    lease_ttl_s: Seconds = 30.0
    """A generator without a heartbeat for so long (at least 1 s) loses its leases."""
    max_group_bytes: Positive = 64 * 2**20
    """Largest group; Redis takes 512 MiB at most by default."""
    deadline_s: Seconds = 60.0
    """How long a client retries a call before it fails."""
    journal: bool = True
    """Whether zmq:// keeps its state in buffer/ of the run's folder."""
    durability: Literal["process", "machine"] = "process"
    """What the journal survives: a killed buffer, or a power failure too, by waiting for the disk.
    """
    record: bool = False
    """Keep what was trained in record/ of the run's folder, for `streamrl replay`."""
    record_max_bytes: Positive = 10 * 2**30
    """Of record/; the oldest steps go first."""
    curve: Path | None = None
    """Folder of keys (`streamrl keys new`), which zmq:// and `weights.address` need off loopback.
    """

    _password: SecretStr = PrivateAttr(default=SecretStr(""))

    @model_validator(mode="wrap")
    @classmethod
    def _holds_no_password(
        cls, value: Any, validate: ModelWrapValidatorHandler["BufferSettings"]
    ) -> "BufferSettings":
        if not isinstance(value, Mapping) or not isinstance(value.get("url"), str):
            return validate(value)
        url, password = hide_password(value["url"])
        settings = validate({**value, "url": url})
        settings._password = SecretStr(password)
        return settings

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url.startswith(_BUFFER_SCHEMES):
            raise ValueError(f"was {url!r}; it must start with {', '.join(_BUFFER_SCHEMES)}")
        if "password=" in url:
            raise ValueError(f"was {url!r}; a password belongs into {REDIS_PASSWORD}")
        if not url.startswith("memory://"):
            require_places(url, needs_port=url.startswith("zmq://"))
        return url

    @field_validator("lease_ttl_s")
    @classmethod
    def _outlasts_a_pause(cls, lease_ttl_s: float) -> float:
        if lease_ttl_s < SHORTEST_LEASE_S:
            raise ValueError(
                f"was {lease_ttl_s:g}; it must be at least {SHORTEST_LEASE_S:g}: with a heartbeat "
                f"every {lease_ttl_s / 4:g} s any pause of a generator ends its leases, and no "
                "group would be finished"
            )
        return lease_ttl_s

    def contradictions(self) -> Iterator[str]:
        if self.binds_url and (why := lacks_keys("buffer.url", self.url, self.curve)):
            yield why

    @property
    def is_steered(self) -> bool:
        """Whether the learner steers the bound on staleness."""
        return isinstance(self.max_staleness, SteeredStaleness)

    @property
    def largest_staleness(self) -> int:
        """In versions: no token that is trained is older, whether the bound is steered or not."""
        bound = self.max_staleness
        return bound.max if isinstance(bound, SteeredStaleness) else bound

    @property
    def smallest_staleness(self) -> int:
        """In versions, the lowest that the bound may be: the largest one unless it is steered."""
        bound = self.max_staleness
        return bound.min if isinstance(bound, SteeredStaleness) else bound

    @property
    def password_of_url(self) -> str:
        """The one that `url` was given with; "" if it had none."""
        return self._password.get_secret_value()

    @property
    def password(self) -> str:
        """The one that `url` was given with, or else of the environment or the file; "" if none.

        Raises:
            ConfigError: the file cannot be used.
        """
        return self.password_of_url or read_password(self.password_file)

    @property
    def secret_url(self) -> str:
        """`url` with its password: for a connection, and for nothing that is printed or written.

        Raises:
            ConfigError: `url` was written without its password, and there is none elsewhere.
        """
        if password := self.password:
            return with_password(self.url, password)
        if f":{HIDDEN}@" in self.url:
            raise ConfigError(
                f"buffer.url: {self.url} was written without its password: give it in the "
                f"environment, as {REDIS_PASSWORD}, or in a file, as buffer.password_file"
            )
        return self.url

    @property
    def binds_url(self) -> bool:
        """Whether the buffer daemon listens at `url`; else Redis tells where it does."""
        return self.url.startswith("zmq://")


_BUFFER_SCHEMES = (
    *("memory://", "zmq://", "redis://", "rediss://"),
    *("redis+sentinel://", "redis+cluster://", "rediss+cluster://"),
)
