"""`run`: the name, folder, length and seed of a run.

`parity` limits how far engine and learner may disagree; `cluster` has what the machines of a run
have in common (Ray or Slurm say which machines they are).
"""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.addresses import StoreUrl
from streamrl.config.section import (
    NotNegative,
    Positive,
    PositiveNumber,
    Probability,
    Seconds,
    Section,
    Share,
    at_most,
    refuse_unless,
)
from streamrl.types.ranges import ID_PATTERN, MAX_VERSION

HostRole: TypeAlias = Literal["buffer", "learner", "generator", "validator"]

_is_filled_in = refuse_unless(
    lambda folder: not re.search(r"\$\{|(^|/)\$\w", str(folder)),
    "nothing is filled in for $: write the folder",
)


class SignSettings(Section):
    """Thresholds beyond which a run is reported as not learning, with a remedy."""

    steps: NotNegative = 10
    """Steps over which a sign has to persist; 0: look for none."""
    max_reward_fall: Share = 0.5
    """Fraction of the best mean reward that may be lost."""
    max_held_out_fall: Share = 0.2
    """Fraction of the best held-out reward that two validations may lose."""
    max_passes: PositiveNumber = 16.0
    """Passes over the prompts during which the held-out reward may fail to rise."""
    min_entropy_frac: Probability = 0.05
    """Lowest entropy, as a fraction of that of the first steps, unless the prompts are solved."""
    min_eff_sample_size: Probability = 0.3
    """Lowest effective sample size, as a fraction of the batch."""
    max_clip_ratio: Probability = 0.5
    """Fraction of responses that may be truncated."""
    max_kl: PositiveNumber = 1.0
    """Largest KL to the reference policy, in nats per token."""


class RunSettings(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=ID_PATTERN)] = "default"
    """Name of the run and of its folder."""
    folder: Annotated[Path, _is_filled_in] = Path("runs")
    """Folder in which run folders are made."""
    folder_mirror: StoreUrl | None = None
    """Where a launch copies the run folder, so that the run can resume elsewhere; as
    in `weights.store`."""
    max_steps: Annotated[Positive, at_most(MAX_VERSION)] = 100
    """Steps until the run ends."""
    total_epochs: PositiveNumber | None = None
    """Passes over the rows of `data.source` until the run ends, or `max_steps` if that is
    sooner."""
    seed: NotNegative = 0
    """Seed of prompts, sampling and initialization."""
    resume: Literal["never", "auto"] | Path = "never"
    """Checkpoint to resume from: the newest complete one (auto), none (never), or the path of
    one."""
    evaluate: bool = True
    """Whether a launch scores the final checkpoint on held-out prompts (never with agents)."""
    stall_s: Seconds = 300.0
    """Seconds after which a step that still waits or computes is reported with its cause."""
    signs: SignSettings = SignSettings()
    max_restarts: NotNegative = 5
    """Number of times that a launch restarts a failed process within `restart_window_s`."""
    restart_window_s: Seconds = 600.0
    """Seconds after which a restart no longer counts, if the run has made a step since."""
    stop_s: Annotated[float, Field(ge=10)] = 20.0
    """Seconds from SIGTERM or Ctrl-C until every process must have ended; at least 15 more than
    `generator.drain_s`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level of the daemons."""
    log_format: Literal["text", "json"] = "text"
    """Log format; json: one object per line, with time, level, role, pid, logger, message and
    exception."""

    @property
    def path(self) -> Path:
        return self.folder / self.name


class ParitySettings(Section):
    """How far engine and learner may disagree about the same tokens before training starts."""

    max_mean_gap: PositiveNumber | None = None
    """Largest mean |log-probability of learner - engine|, in nats, at which a launch starts; null:
    not checked."""
    max_gap: PositiveNumber | None = None
    """The same for the worst token."""
    num_prompts: Positive = 16
    """Number of prompts to compare, with one response each."""

    @property
    def is_required(self) -> bool:
        return self.max_mean_gap is not None or self.max_gap is not None


class ClusterSettings(Section):
    """What the machines of a multi-machine run have in common."""

    on_host_failure: Literal["stop", "continue"] = "continue"
    """When a host that has only generators fails: end the run, or continue."""
    start_s: Seconds = 300.0
    """Longest wait for machines to answer and processes to start, in seconds."""
    first_port: Annotated[int, Field(ge=1024, le=65_000)] = 29_600
    """First of the ports planned for buffer, weights and ranks."""
