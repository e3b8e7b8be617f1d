"""Traces of chosen steps, for torch's profiler views, for its memory view, or for Nsight Systems.

    <run>/profiler/step3-rank0.json.gz        chrome://tracing, Perfetto, HTA
    <run>/profiler/step3-rank0.pickle         pytorch.org/memory_viz

Invariant: a step that is not chosen costs one comparison. What cannot be written is logged; the
step counts nevertheless.
"""

import logging

import torch

from streamrl.config import RunConfig
from streamrl.errors import ConfigError

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000


class Tracer:
    """Of one rank; `begin` and `end` stand around the steps, in the thread that computes them."""

    def __init__(self, config: RunConfig, device: torch.device, rank: int) -> None:
        self._settings = settings = config.learner.profiler
        for name in ("memory", "nvtx"):
            if getattr(settings, name) and device.type != "cuda":
                raise ConfigError(
                    f"learner.profiler.{name}: was true, and the learner runs on "
                    f"{device.type}; it needs a GPU"
                )
        is_chosen = rank in settings.ranks or not settings.ranks
        self._steps = frozenset(settings.steps) if is_chosen else frozenset()
        self._folder = config.run.path / "profiler"
        self._rank = rank
        self._step: int | None = None
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Record this step, if it is chosen."""
        if step in self._steps:
            self._step = step
            self._start()

    def end(self) -> None:
        """Write what was recorded."""
        if self._step is None:
            return
        path = self._folder / f"step{self._step}-rank{self._rank}"
        self._stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._settings.memory:
                torch.cuda.memory._dump_snapshot(f"{path}.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            if self._profile is not None:
                self._profile.export_chrome_trace(f"{path}.json.gz")
        except OSError as error:
            log.warning("the trace %s could not be written: %s", path.name, error)
        else:
            log.info("recorded %s", path)
        self._step = self._profile = None

    def _start(self) -> None:
        if self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        if self._settings.nvtx:
            # What `nsys profile --capture-range=cudaProfilerApi` waits for.
            torch.cuda.profiler.start()
        else:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()

    def _stop(self) -> None:
        if self._settings.nvtx:
            torch.cuda.profiler.stop()
        if self._profile is not None:
            self._profile.stop()
