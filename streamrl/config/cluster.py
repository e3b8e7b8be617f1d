"""`cluster`: what the machines of a run have in common; which these are, Ray or Slurm says."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.section import Seconds, Section

HostRole: TypeAlias = Literal["buffer", "learner", "generator", "validator"]


class ClusterSettings(Section):
    """The machines of a run, where it has several."""

    on_host_failure: Literal["stop", "continue"] = "continue"
    """When a host fails that has only generators: end the run, or go on with the others. A host
    with the learner or the buffer always ends it."""
    start_s: Seconds = 300.0
    """Longest wait until the machines that a run needs have answered and its processes have
    started."""
    first_port: Annotated[int, Field(ge=1024, le=65_000)] = 29_600
    """Ports that the plan gives to buffer, weights and ranks are counted from here."""
