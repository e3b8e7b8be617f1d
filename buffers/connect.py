"""From a URL to a buffer client: the one place where a backend is chosen.

A new backend implements `streamrl.interfaces.TrajectoryBuffer`, passes `tests/contract`, and gets a
line in `connect`.
"""

from streamrl.config.sections import BufferSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import TrajectoryBuffer


def connect(settings: BufferSettings) -> TrajectoryBuffer:
    """A client of the buffer at `buffer.url`; call it in the event loop that will use it."""
    scheme = settings.url.partition("://")[0]
    match scheme:
        case "zmq":
            from buffers.zmq_client import ZmqBuffer

            if settings.url.endswith(":0"):
                raise ConfigError(
                    f"buffer.url {settings.url} has port 0, which only `streamrl launch` resolves; "
                    "daemons started on their own need a port they agree on"
                )
            return ZmqBuffer(settings.url, deadline_s=settings.deadline_s, curve=settings.curve)
        case _:
            raise ConfigError(
                f"buffer.url {settings.url} cannot be shared between processes; use zmq://host:port"
            )
