"""The steps of a weight update that every engine takes alike.

    check the manifest | receive, while sampling goes on | load, in a pause | report the times

Invariant: `policy_version` changes in the pause, so a token sampled after it is of the new version.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from time import perf_counter

from actors.engines.manifest import Shapes, require_same_parameters
from streamrl.types import LoadReport, WeightUpdate


class UpdatableEngine(ABC):
    """The version an engine samples with; `shapes` are those of its parameters, by name."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._policy_version = 0
        self._learner_id = ""
        self._pause_s = 0.0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def learner_id(self) -> str:
        return self._learner_id

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receives the update while sampling goes on, then loads it between two steps.

        Raises:
            WeightTransferError: it is of another model or did not arrive; nothing has changed.
        """
        start = perf_counter()
        require_same_parameters(update.manifest, self._shapes)
        await self._receive(update)
        received = perf_counter()
        pause_s = await self._load(update, partial(self._on_loaded, update))
        self._pause_s += pause_s
        return LoadReport(
            transfer_s=received - start, load_s=perf_counter() - received, pause_s=pause_s
        )

    @abstractmethod
    async def _receive(self, update: WeightUpdate) -> None:
        """Gets the update to where `_load` finds it.

        Raises:
            WeightTransferError: it did not arrive.
        """

    @abstractmethod
    async def _load(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        """Loads what was received and calls `on_loaded` before sampling goes on. Returns the
        seconds in which nothing was sampled."""

    def _on_loaded(self, update: WeightUpdate) -> None:
        self._policy_version, self._learner_id = update.policy_version, update.learner_id
