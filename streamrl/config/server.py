"""Settings of engines that are reached over HTTP, whichever library serves them.

The base of `generator.vllm` and `generator.sglang`.
"""

from typing import Any

from pydantic import Field, field_validator

from streamrl.config.numbers import Seconds
from streamrl.config.section import Section


class ServerSettings(Section):
    url: str | None = None
    """http://host:port of a server that is up already; null: this generator starts its own."""
    api_key: str | None = Field(default=None, repr=False)
    """Sent with every request; better in STREAMRL__GENERATOR__VLLM__API_KEY (or SGLANG) than in a
    file."""
    start_timeout_s: Seconds = 600.0
    """How long a server may take to come up."""
    request_timeout_s: Seconds = 3600.0
    """Longest wait for one completion; it then fails alone."""
    patience_s: Seconds = 30.0
    """Connections lost are tried again for so long; then the generator ends with an error."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"was {url!r}; it must be http://host:port")
        return url

    def changed(self, *apart_from: str) -> list[str]:
        """Fields that are not as they are by default."""
        defaults: dict[str, Any] = {n: f.default for n, f in type(self).model_fields.items()}
        names = defaults.keys() - set(apart_from)
        return sorted(name for name in names if getattr(self, name) != defaults[name])
