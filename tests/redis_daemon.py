"""The buffer daemon of a run in Redis, in a thread of the test, as `streamrl buffer` serves it."""

import asyncio
import threading
from typing import Any

from buffers.daemon import serve_from_redis
from streamrl.config import RunConfig
from streamrl.errors import StreamRLError
from streamrl.tracking.prometheus import Exported
from streamrl.types import BufferStats


class RedisDaemon:
    """Serves from the start on. `error` is what has ended it, `stats` are the last ones."""

    def __init__(self, url: str, run: str = "run", **settings: Any) -> None:
        """`settings` are those of the ledger."""
        learner = {"groups_per_step": settings.pop("groups_per_step", 2)}
        max_steps = settings.pop("final_version", 10**6)
        self._config = RunConfig.model_validate(
            {
                "run": {"name": run, "max_steps": max_steps},
                "model": {"path": "unused"},
                "data": {"source": "addition"},
                "learner": learner,
                "buffer": {"url": url, "max_staleness": 1, "deadline_s": 20.0, **settings},
            }
        )
        self._stop = threading.Event()
        self.stats: BufferStats | None = None
        self.error: StreamRLError | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        """As a signal does; another daemon may take over at once."""
        self._stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Until it ends by itself."""
        self._thread.join()

    def _serve(self) -> None:
        exported = Exported(is_on=False)
        try:
            self.stats = asyncio.run(serve_from_redis(self._config, self._stop, exported))
        except StreamRLError as error:
            self.error = error
