"""Seconds of the phases of a step, summed under their names.

On a GPU a phase is the time between two events of its stream, read at the end of the step: nothing
waits for the device in between. On a CPU it is wall-clock time.

Invariant: a phase that is open when the seconds are read is not lost, it counts in the next step.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Moment = float | torch.cuda.Event


class StepTimes:
    """Of one thread at a time, on one device."""

    def __init__(self, device: torch.device | None = None, *, with_nvtx: bool = False) -> None:
        self._has_events = device is not None and device.type == "cuda"
        self._with_nvtx = with_nvtx
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._open: dict[str, tuple[Moment, int | None]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside under this name."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        mark = torch.cuda.nvtx.range_start(f"streamrl/{name}") if self._with_nvtx else None
        self._open[name] = (self._now(), mark)

    def end(self, name: str) -> None:
        started, mark = self._open.pop(name)
        if mark is not None:
            torch.cuda.nvtx.range_end(mark)
        self._spans.append((name, started, self._now()))

    def is_open(self, name: str) -> bool:
        return name in self._open

    def take(self, *names: str) -> dict[str, float]:
        """`learner/NAME_s` of each name, 0 where nothing ran under it; counting starts anew."""
        seconds = dict.fromkeys(names, 0.0)
        for name, started, ended in self._spans:
            seconds[name] += _seconds(started, ended)
        self._spans = []
        return {f"learner/{name}_s": value for name, value in seconds.items()}

    def _now(self) -> Moment:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(started: Moment, ended: Moment) -> float:
    if isinstance(started, float) and isinstance(ended, float):
        return ended - started
    assert isinstance(started, torch.cuda.Event)
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3
