"""`run`: the name of a run, its folder, its length and its seed.

`parity` is how far engine and learner may disagree.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from streamrl.config.addresses import StoreUrl
from streamrl.config.section import NotNegative, Positive, Probability, Seconds, Section
from streamrl.types.ranges import ID_PATTERN

# What other systems call their ways to resume, and no path.
_NO_PATHS = ("disable", "resume_path", "none")


class SignSettings(Section):
    """When a run is said not to learn: in the learner's log, by the live view, `streamrl status`
    and the summary, each time with a remedy."""

    steps: NotNegative = 10
    """Steps over which a sign has to hold; 0: none is looked for."""
    max_reward_fall: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the best mean reward of so many steps that may be lost."""
    max_held_out_fall: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the best held-out reward that the last two validations may both have lost; with few
    prompts more, since that may be chance."""
    max_passes: Annotated[float, Field(gt=0)] = 16.0
    """Passes over the prompts of a file, where no held-out reward has risen meanwhile."""
    min_entropy_frac: Probability = 0.05
    """Entropy in parts of that of the first steps, unless the prompts are solved."""
    min_eff_sample_size: Probability = 0.3
    """Effective sample size of rollout importance sampling, in parts of the batch."""
    max_clip_ratio: Probability = 0.5
    """Part of the responses that a limit may cut."""
    max_kl: Annotated[float, Field(gt=0)] = 1.0
    """KL to the reference, in nats a token."""


class RunSettings(Section):
    """The run as a whole: its name, its folder, its length, its seed."""

    name: Annotated[str, Field(pattern=ID_PATTERN)] = "default"
    """Name of the run and of its folder."""
    folder: Path = Path("runs")
    """Where run folders are made."""
    folder_mirror: StoreUrl | None = None
    """Where a launch keeps a copy of the run's folder, from which `--resume` goes on where this
    machine is lost: s3://BUCKET/FOLDER, gs://, hf://buckets/USER/BUCKET or file:///FOLDER. It is
    brought up to date with each checkpoint and at the end; each run has a folder of its name."""
    max_steps: Positive = 100
    """Steps until the run ends."""
    total_epochs: Annotated[float, Field(gt=0)] | None = None
    """The same in passes over the rows of `data.source`, a file. If both are given, the smaller one
    ends the run."""
    seed: NotNegative = 0
    """Seed of the prompt stream, of sampling and of initialization."""
    resume: Literal["never", "auto"] | Path = "never"
    """`auto` goes on from the newest complete checkpoint, if there is one; a path names one, of
    this run or another. Newer ones are kept in abandoned/."""
    evaluate: bool = True
    """Whether `streamrl launch` scores the final checkpoint on held-out prompts."""
    stall_s: Seconds = 300.0
    """A step that waits or computes longer is reported with its cause, in the learner's log and by
    `streamrl status`."""
    signs: SignSettings = SignSettings()
    """What says that the run does not learn."""
    max_restarts: NotNegative = 5
    """Times that `streamrl launch` starts a failed process again within `restart_window_s`; further
    failures end the run."""
    restart_window_s: Seconds = 600.0
    """Restarts longer ago are not counted, except those since which the run has made no new
    step."""
    stop_s: Annotated[float, Field(ge=10)] = 20.0
    """Time from a first SIGTERM or Ctrl-C to the end of every process of a launch; a daemon that
    has not ended 8 s before is ended by force. Raise it for a model whose step and save take
    longer. It is `generator.drain_s` and 15 s at least."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What the daemons write to their logs."""
    log_format: Literal["text", "json"] = "text"
    """`json`: every line of a log is one object with time, level, role, pid, logger, message and
    exception."""

    @field_validator("resume")
    @classmethod
    def _is_a_path(cls, resume: str | Path) -> str | Path:
        if str(resume).lower() in _NO_PATHS:
            raise ValueError(
                f"was {str(resume)!r}; allowed: never, auto or the path of a checkpoint"
            )
        return resume

    @property
    def path(self) -> Path:
        return self.folder / self.name


class ParitySettings(Section):
    """How far engine and learner may disagree on the same tokens, before anything is trained."""

    max_mean_gap: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |log-probability of the learner - of the engine|, in nats, with which `streamrl
    launch` starts; null does not ask."""
    max_gap: Annotated[float, Field(gt=0)] | None = None
    """The same for the worst single token."""
    num_prompts: Positive = 16
    """Prompts sampled for the comparison, one response each."""

    @property
    def is_required(self) -> bool:
        return self.max_mean_gap is not None or self.max_gap is not None
