"""The settings of each owner: one section per part of the system, each field explained below it.

Invariant: what a section can check by itself it checks here; what takes two sections is checked in
`streamrl.config.run`. Read by every daemon; nothing here imports torch.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamrl.config.addresses import is_loopback
from streamrl.config.numbers import NotNegative, Positive, Probability, Seconds
from streamrl.config.section import Section


class RunSettings(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "default"
    """Name of the run and of its folder."""
    folder: Path = Path("runs")
    """Where run folders are made."""
    max_steps: Positive = 100
    """Optimizer steps until the run ends."""
    seed: int = 0
    """Seed of the prompt stream, of sampling and of initialization."""
    resume: Literal["never", "auto"] | Path = "never"
    """`auto` goes on from the newest checkpoint of the run folder, if there is one; a path names
    the checkpoint."""
    evaluate: bool = True
    """Whether `streamrl launch` scores the final checkpoint on held-out prompts."""
    stall_s: Seconds = 300.0
    """A step that waits or computes longer has its cause named: in the learner's log, again each
    time the wait has doubled, and by `streamrl status`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What the daemons write to their logs."""

    @property
    def path(self) -> Path:
        return self.folder / self.name


class RecipeSettings(Section):
    """A small Llama and its character tokenizer, made locally and warm-started (make-model)."""

    hidden_size: Positive = 128
    """Width of the residual stream."""
    intermediate_size: Positive = 384
    """Width of the MLP."""
    num_layers: Positive = 3
    """Decoder layers."""
    num_heads: Positive = 4
    """Attention heads."""
    alphabet: str = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz?"
    """Characters of the tokenizer; one token each."""
    warm_start_steps: NotNegative = 400
    """Upper bound of supervised steps; 0 leaves the model random."""
    warm_start_accuracy: Probability = 0.3
    """Supervised steps end when this sampled exact match is reached."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.06
    """Standard deviation of the random weights; narrow models learn faster from wider ones."""
    batch_size: Positive = 128
    """Examples per supervised step."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Learning rate of the supervised steps."""


class ModelSettings(Section):
    path: str
    """Folder (or hub name) of a Hugging Face causal language model."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, if it is not with the model."""
    trust_remote_code: bool = False
    """Allow models that bring their own code."""
    recipe: RecipeSettings | None = None
    """How `streamrl make-model` makes the model when `path` does not exist."""

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path


class DataSettings(Section):
    source: str
    """A .jsonl or .parquet file, the name of a procedural task (addition, reverse, copy, sort), or
    reasoning_gym:NAME."""
    source_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a procedural task."""
    eval_source: str | None = None
    """Held-out prompts; a procedural task without one holds out prompts of its own."""
    num_eval_prompts: Positive = 256
    """Held-out prompts an evaluation uses."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the reference answer."""
    chat_template: Literal["native", "none"] | Path = "native"
    """`native` uses the tokenizer's template, if it has one; `none` feeds the prompt as it stands;
    a path names a Jinja file."""
    system_prompt: str | None = None
    """Put in front of prompts that are strings."""
    max_prompt_length: Positive = 1024
    """Longest prompt, in tokens."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What happens to longer ones: refuse, cut that side, or drop the prompt (counted)."""
    shuffle: bool = True
    """Draw files in a new seeded order each term."""
    reward: str = "exact_match"
    """exact_match, numeric_answer, regex, or PATH.py:FUNCTION."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""


class BufferSettings(Section):
    url: str = "zmq://127.0.0.1:0"
    """zmq://host:port, where port 0 lets `streamrl launch` pick a free one; redis://, rediss://,
    redis+sentinel://host,host/service, redis+cluster://host,host or rediss+cluster://, with
    user:password@ before the host; or memory://."""
    max_staleness: NotNegative = 2
    """Versions a group may be behind when it is trained; 0 is the synchronous algorithm."""
    lease_ttl_s: Seconds = 30.0
    """A generator not heard of for so long loses its leases."""
    max_group_bytes: Positive = 64 * 2**20
    """Largest group taken in."""
    deadline_s: Seconds = 60.0
    """How long a client waits for the buffer before it gives up."""
    journal: bool = True
    """Whether zmq:// keeps its state in the run folder (buffer/journal.sqlite)."""
    durability: Literal["process", "machine"] = "process"
    """What the journal survives: a killed buffer, or (one fsync a commit) a power failure too."""
    curve: Path | None = None
    """Folder of the keys that zmq:// needs on any but a loopback address (`streamrl keys new`)."""

    @field_validator("url")
    @classmethod
    def _has_known_scheme(cls, url: str) -> str:
        if not url.startswith(_BUFFER_SCHEMES):
            raise ValueError(f"was {url!r}; it must start with {', '.join(_BUFFER_SCHEMES)}")
        return url

    @model_validator(mode="after")
    def _has_keys(self) -> "BufferSettings":
        if self.url.startswith("zmq://") and self.curve is None and not is_loopback(self.url):
            raise ValueError(
                f"buffer.url: was {self.url!r}, which other machines can reach; that needs keys: "
                "make them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
            )
        return self

    @property
    def has_daemon(self) -> bool:
        """Whether a process of ours serves the buffer."""
        return self.url.startswith("zmq://")


_BUFFER_SCHEMES = (
    *("memory://", "zmq://", "redis://", "rediss://"),
    *("redis+sentinel://", "redis+cluster://", "rediss+cluster://"),
)


class OptimizerSettings(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay; vectors (norms, biases) are exempt."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global norm gradients are clipped to; null switches clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, down to `min_lr_ratio` at `run.max_steps`."""
    warmup_steps: NotNegative = 0
    """Steps over which the rate rises linearly from 0."""
    min_lr_ratio: Probability = 0.0
    """Floor of the schedule as a fraction of `lr`."""


class CheckpointSettings(Section):
    every: Positive = 50
    """Steps between checkpoints; one is always made at the end."""
    keep: Positive = 2
    """Newest checkpoints kept."""


class LearnerSettings(Section):
    groups_per_step: Positive = 32
    """Trajectory groups per optimizer step."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens (prompt and response) of one forward and backward pass."""
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; master weights and optimizer stay float32."""
    device: str = "auto"
    """cpu, cuda, cuda:0, ...; auto takes a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads of the learner; 0 leaves torch's choice."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    report_entropy: bool = True
    """Measure the policy's entropy each step, also where the loss does not need it."""


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


class TrackingSettings(Section):
    """metrics.jsonl is always written."""

    console: bool = True
    """One line a step in the learner's log."""
    tensorboard: bool = False
    """Event files in the run folder (extra: tensorboard)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases (extra: wandb)."""
    project: str = "streamrl"
    """Project name at Weights & Biases."""
