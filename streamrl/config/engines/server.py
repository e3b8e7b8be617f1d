"""Settings of engines that are reached over HTTP, whichever library serves them.

The base of `generator.vllm` and `generator.sglang`.
"""

import os
from typing import Any, ClassVar, Self

from pydantic import field_validator, model_validator

from streamrl.config.section import Seconds, Section
from streamrl.errors import ConfigError


class ServerSettings(Section):
    section: ClassVar[str]

    url: str | tuple[str, ...] | None = None
    """http://host:port of a server that is up already, or a list of servers of one model that share
    the generator's requests; null: this generator starts its own. Generators of one run may name
    the same server, by the same address."""
    api_key_variable: str | None = None
    """Environment variable that holds the key which the server at `url` asks for; keys don't belong
    into files."""
    start_timeout_s: Seconds = 600.0
    """How long a server may take to come up."""
    retry_timeout_s: Seconds = 30.0
    """A server that makes no connection is tried again for so long, then the generator ends; one
    that is busy for so long fails the request."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for one in _urls(url):
            if not one.startswith(("http://", "https://")):
                raise ValueError(f"was {one!r}; it must be http://host:port")
            if "@" in one.partition("//")[2].partition("/")[0]:
                raise ValueError("holds a password; the server's key belongs into api_key_variable")
        if url == ():
            raise ValueError("was an empty list; name a server, or leave it out")
        places = [one.rstrip("/") for one in _urls(url)]
        if twice := [place for place in places if places.count(place) > 1]:
            raise ValueError(f"{twice[0]} stands there twice")
        return url

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers elsewhere."""
        return _urls(self.url)

    @model_validator(mode="after")
    def _has_a_server_for_its_key(self) -> Self:
        if self.api_key_variable is not None and self.url is None:
            raise ValueError("api_key_variable is for a server elsewhere; set url, or leave it out")
        return self

    @property
    def api_key(self) -> str | None:
        """
        Raises:
            ConfigError: the variable is not set.
        """
        if self.api_key_variable is None:
            return None
        if self.api_key_variable not in os.environ:
            raise ConfigError(
                f"{self.section}.api_key_variable: there is no {self.api_key_variable} in the "
                f"environment, and {self.urls[0]} asks for a key"
            )
        return os.environ[self.api_key_variable]

    def leaving_server_alone(self, engine: str, *apart_from: str) -> Self:
        """These settings; with `url`, all but the fields named must be as they are by default.

        Raises:
            ValueError: one of the others is set here, where the server does not get to see it.
        """
        fields = type(self).model_fields
        defaults: dict[str, Any] = {n: f.default for n, f in fields.items() if n not in apart_from}
        changed = sorted(name for name in defaults if getattr(self, name) != defaults[name])
        if self.url and changed:
            raise ValueError(
                f"{changed[0]} is chosen where the server of {engine}.url is started; leave it out "
                "here"
            )
        return self


def _urls(url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (url,) if isinstance(url, str) else url or ()
