"""`run`: the name of a run, its folder, its length and its seed.

`parity` is how far engine and learner may disagree, and `cluster` what the machines of a run have
in common; which these are, Ray or Slurm says.
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
# What other systems call their ways to resume, and no path.
_is_a_path = refuse_unless(
    lambda resume: str(resume).lower() not in ("disable", "resume_path", "none"),
    "allowed: never, auto or the path of a checkpoint",
)


class SignSettings(Section):
    """When a run is said not to learn, each time with a remedy."""

    steps: NotNegative = 10
    """Over which a sign has to hold; 0 looks for none."""
    max_reward_fall: Share = 0.5
    """Part of the best mean reward that may be lost."""
    max_held_out_fall: Share = 0.2
    """Part of the best held-out reward that two validations may have lost; more with few prompts.
    """
    max_passes: PositiveNumber = 16.0
    """Passes over the prompts without a rise of the held-out reward."""
    min_entropy_frac: Probability = 0.05
    """Part of the first steps' entropy, unless the prompts are solved."""
    min_eff_sample_size: Probability = 0.3
    """Effective sample size, in parts of the batch."""
    max_clip_ratio: Probability = 0.5
    """Share of responses that a limit may cut."""
    max_kl: PositiveNumber = 1.0
    """To the reference, in nats a token."""


class RunSettings(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=ID_PATTERN)] = "default"
    """Name of the run and of its folder."""
    folder: Annotated[Path, _is_filled_in] = Path("runs")
    """Where run folders are made."""
    folder_mirror: StoreUrl | None = None
    """Where a launch copies the run's folder, to go on elsewhere: s3://BUCKET/FOLDER, gs://,
    hf://buckets/USER/BUCKET or file:///FOLDER."""
    max_steps: Annotated[Positive, at_most(MAX_VERSION)] = 100
    """Steps until the run ends."""
    total_epochs: PositiveNumber | None = None
    """Passes over the rows of `data.source`; the smaller of it and `max_steps` counts."""
    seed: NotNegative = 0
    """Of prompts, sampling and initialization."""
    resume: Annotated[Literal["never", "auto"] | Path, _is_a_path] = "never"
    """`auto`: from the newest complete checkpoint, if there is one; or the path of one, of this run
    or another."""
    evaluate: bool = True
    """Whether a launch scores the final checkpoint on held-out prompts; agents play none."""
    stall_s: Seconds = 300.0
    """A step that waits or computes longer is reported with its cause."""
    signs: SignSettings = SignSettings()
    max_restarts: NotNegative = 5
    """Times that a launch restarts a failed process within `restart_window_s`."""
    restart_window_s: Seconds = 600.0
    """Older restarts do not count, unless the run has made no step since."""
    stop_s: Annotated[float, Field(ge=10)] = 20.0
    """From SIGTERM or Ctrl-C to the end of every process; at least 15 s more than
    `generator.drain_s`. Raise it where a step and a save take longer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the daemons."""
    log_format: Literal["text", "json"] = "text"
    """`json`: an object a line, with time, level, role, pid, logger, message and exception."""

    @property
    def path(self) -> Path:
        return self.folder / self.name


class ParitySettings(Section):
    """How far engine and learner may disagree on the same tokens before training."""

    max_mean_gap: PositiveNumber | None = None
    """Largest mean |log-probability of learner - engine|, in nats, with which a launch starts; null
    does not ask."""
    max_gap: PositiveNumber | None = None
    """The same of the worst token."""
    num_prompts: Positive = 16
    """Prompts compared, one response each."""

    @property
    def is_required(self) -> bool:
        return self.max_mean_gap is not None or self.max_gap is not None


class ClusterSettings(Section):
    """The machines of a run with several."""

    on_host_failure: Literal["stop", "continue"] = "continue"
    """Where a host with generators alone fails: end the run, or go on."""
    start_s: Seconds = 300.0
    """Longest wait for machines to answer and processes to start."""
    first_port: Annotated[int, Field(ge=1024, le=65_000)] = 29_600
    """First of the planned ports of buffer, weights and ranks."""
