"""Gauges of a vLLM engine, collected by vLLM's own interface for statistics.

vLLM calls `record` after each step, in the event loop. It may rename the fields of its records from
one release to the next; only this file reads them.
"""

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class Gauges(StatLoggerBase):
    """The last reading of the scheduler, and totals since the start."""

    def __init__(self) -> None:
        self.num_active = 0
        self.num_waiting = 0
        self.kv_usage = 0.0
        self.num_tokens = 0
        self.num_preemptions = 0

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> "Gauges":
        """vLLM expects a factory; there is one engine, so one object."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.num_active = scheduler_stats.num_running_reqs
            self.num_waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing: the generator's log names the engine."""
