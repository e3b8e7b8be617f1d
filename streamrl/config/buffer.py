"""`buffer`: where trajectory groups wait, and how stale they may become."""

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


class SteeredStaleness(Section):
    """A staleness bound that follows the effective sample size."""

    min: Versions
    """The initial and lowest bound."""
    max: Versions
    """The highest bound; staler tokens are never trained."""
    ess: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """The bound falls while the effective sample size is below this."""

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
    """zmq://host:port (port 0: the launch picks one); redis://user@host, rediss://,
    redis+sentinel://host,host/service, redis+cluster://host,host or rediss+cluster://."""
    password_file: Path | None = None
    """File with the Redis password; STREAMRL_REDIS_PASSWORD takes precedence."""
    max_staleness: MaxStaleness = 2
    """Most versions that a group may be behind when it is trained; 0: synchronous. With {min, max,
    ess} the learner steers the bound."""
    overdue: Literal["wait", "train", "drop"] = "wait"
    """What the learner does with groups that are unfinished when due: wait for them, train them
    late (beyond `max_staleness`), or drop them."""
    lease_ttl_s: Annotated[float, Field(ge=1)] = 30.0
    """Seconds without a heartbeat after which a generator loses its leases."""
    max_group_bytes: Positive = 64 * 2**20
    """Largest group in bytes; Redis accepts 512 MiB at most by default."""
    deadline_s: Seconds = 60.0
    """Seconds for which a client retries a call before it fails."""
    journal: bool = True
    """Whether zmq:// keeps its state in buffer/ of the run folder."""
    durability: Literal["process", "machine"] = "process"
    """What the journal survives: a killed buffer, or also a power failure (slower)."""
    record: bool = False
    """Keep the trained groups in record/ of the run folder, for `streamrl replay`."""
    record_max_bytes: Positive = 10 * 2**30
    """Most bytes of record/; the oldest steps are deleted first."""
    curve: Path | None = None
    """Folder with keys (`streamrl keys new`), required by zmq:// and `weights.address` on addresses
    other than loopback."""

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
        require_places(url, needs_port=url.startswith("zmq://"))
        return url

    def contradictions(self) -> Iterator[str]:
        if self.binds_url and (why := lacks_keys("buffer.url", self.url, self.curve)):
            yield why

    @property
    def is_steered(self) -> bool:
        """Whether the learner steers the staleness bound."""
        return isinstance(self.max_staleness, SteeredStaleness)

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of any trained token, in versions, steered or not."""
        bound = self.max_staleness
        return bound.max if isinstance(bound, SteeredStaleness) else bound

    @property
    def smallest_staleness(self) -> int:
        """The lowest possible bound, in versions; equal to the largest unless it is steered."""
        bound = self.max_staleness
        return bound.min if isinstance(bound, SteeredStaleness) else bound

    @property
    def password_of_url(self) -> str:
        """The password that `url` was given with; "" if there was none."""
        return self._password.get_secret_value()

    @property
    def password(self) -> str:
        """The password from `url`, otherwise from the environment or the file; "" if there is none.
        Raises ConfigError if the file cannot be used."""
        return self.password_of_url or read_password(self.password_file)

    @property
    def secret_url(self) -> str:
        """`url` with its password: only for connections, never to be printed or written. Raises
        ConfigError if `url` was written without its password and there is none elsewhere."""
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
        """Whether the buffer daemon listens at `url` itself; otherwise its address is in Redis."""
        return self.url.startswith("zmq://")


_BUFFER_SCHEMES = (
    *("zmq://", "redis://", "rediss://"),
    *("redis+sentinel://", "redis+cluster://", "rediss+cluster://"),
)
