"""`learner`: the batch of a step, the optimizer, the checkpoints and the device."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.config.numbers import Device, NotNegative, Positive, Probability
from streamrl.config.section import Section


class OptimizerSettings(Section):
    """AdamW and its learning rate over the steps."""

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
    """When the learner saves its state, and how many saved states it keeps."""

    every: Positive = 50
    """Steps between checkpoints; one is always made at the end."""
    keep: Positive = 2
    """Newest complete checkpoints kept; those in abandoned/ are not counted and not deleted."""


class LearnerSettings(Section):
    """The batch of a step, and the machine that trains it."""

    groups_per_step: Positive = 32
    """Trajectory groups per optimizer step."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens (prompt and response) of one forward and backward pass."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of the policy."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saved states of the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; master weights and optimizer stay float32."""
    device: Device = "auto"
    """cpu, cuda, cuda:0, ...; auto takes a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads of the learner; 0 leaves torch's choice."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    check_packing: bool = True
    """At start, compare packed with plain transformers; run unpacked what packing changes."""
    report_entropy: bool = True
    """Measure the policy's entropy each step, also where the loss does not need it."""
