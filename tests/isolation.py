"""How programs are kept apart on this machine."""

from actors.sandbox.isolation import Isolation
from actors.sandbox.sandbox import choose
from streamrl.errors import ConfigError


def find_isolation() -> Isolation | None:
    """What `auto` is here; None if nothing holds a program."""
    try:
        return choose()
    except ConfigError:
        return None
