"""A place where metrics go; see `streamrl.tracking`."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Called by the learner once a step; an error of one tracker does not reach the others."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...
