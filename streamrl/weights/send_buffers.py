"""Where the learner leaves a version for the sender, so that neither waits for the other.

Used by `streamrl.weights.sender` alone.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from streamrl.weights.layout import Layout


class SendBuffers:
    """Two copies of the parameters: while a transfer reads one, the learner writes the other.

    Invariant: the learner never waits for a reader, and a reader gets the newest complete version.
    `write` runs in the learner's thread, the rest in the loop that sends.
    """

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        self.layout = layout
        self._data = [
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._lock = threading.Lock()
        self._reading: int | None = None
        self._newest: int | None = None
        self._version = -1

    def write(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy (and cast) the parameters in; then they are the newest."""
        with self._lock:
            busy = self._reading if self._reading is not None else self._newest
            target = 1 - busy if busy is not None else 0
            if self._newest == target:
                self._newest = None
        data = self._data[target]
        for slot in self.layout.slots:
            slot.write(slot.of(data), parameters[slot.spec.name].detach())
        with self._lock:
            self._newest, self._version = target, policy_version

    @contextmanager
    def reading(self) -> Iterator[tuple[int, torch.Tensor] | None]:
        """The newest version and its bytes, safe from being overwritten; None if there is none."""
        with self._lock:
            self._reading = self._newest
            held = None if self._reading is None else (self._version, self._data[self._reading])
        try:
            yield held
        finally:
            with self._lock:
                self._reading = None
