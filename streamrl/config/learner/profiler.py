"""`learner.profiler`: what is recorded of chosen steps."""

from streamrl.config.numbers import NotNegative, Positive
from streamrl.config.section import Section


class ProfilerSettings(Section):
    """What is recorded of chosen steps, in `profiler/` of the run's folder."""

    steps: tuple[Positive, ...] = ()
    """Steps to record, the first is 1; a trace of torch's profiler for each, none if empty."""
    ranks: tuple[NotNegative, ...] = (0,)
    """Ranks that record; all if empty."""
    memory: bool = False
    """Record the allocations of GPU memory, too."""
    nvtx: bool = False
    """Mark the phases of a step for Nsight Systems, and let it capture `steps` instead of torch's
    profiler: `nsys profile --capture-range=cudaProfilerApi streamrl learner ...`."""
