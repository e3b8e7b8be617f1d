"""`cluster`: what the machines of a run have in common; which these are, Ray or Slurm says."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.section import Seconds, Section

HostRole: TypeAlias = Literal["buffer", "learner", "generator", "validator"]


class ClusterSettings(Section):
    """The machines of a run with several."""

    on_host_failure: Literal["stop", "continue"] = "continue"
    """Where a host with generators alone fails: end the run, or go on. One with the learner or the
    buffer always ends it."""
    start_s: Seconds = 300.0
    """Longest wait for machines to answer and processes to start."""
    first_port: Annotated[int, Field(ge=1024, le=65_000)] = 29_600
    """First of the planned ports of buffer, weights and ranks."""
