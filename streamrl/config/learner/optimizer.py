"""`learner.optimizer`: AdamW, its parameter groups, and its learning rate over the steps."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from streamrl.config.numbers import (
    Decay,
    LearningRate,
    LearningRateOrZero,
    NotNegative,
    Probability,
)
from streamrl.config.section import Section


class OptimizerGroup(Section):
    """Parameters of the policy that are trained otherwise than the rest."""

    parameters: Annotated[str, Field(min_length=1)]
    """Pattern of parameter names as transformers has them, such as "*.mlp.*" or
    "model.embed_tokens.weight"; `*` is any text."""
    lr: LearningRateOrZero | None = None
    """Peak learning rate, under the same schedule; 0 freezes them; null is that of the rest."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of all of them, vectors too; null is that of the rest."""


class OptimizerSettings(Section):
    """AdamW and its learning rate over the steps."""

    lr: LearningRate = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay; vectors (norms, biases) are exempt."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Parameters with a rate or decay of their own; the first pattern that matches a name counts.
    The critic has none."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global norm gradients are clipped to; null switches clipping off."""
    max_skipped_updates: NotNegative = 3
    """Updates in a row that are skipped because a gradient is not finite; the next one ends the
    run."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """Shape after the warm-up, down to `min_lr_ratio` at `run.max_steps`."""
    warmup_steps: NotNegative = 0
    """Steps over which the rate rises linearly from 0."""
    warmup_ratio: Probability = 0.0
    """The same as a share of `run.max_steps`; give one of the two."""
    min_lr_ratio: Probability = 0.0
    """Floor of the schedule as a fraction of `lr`."""
    num_cycles: Annotated[float, Field(gt=0)] = 0.5
    """Waves of schedule cosine; 0.5 falls once."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of `run.max_steps`, at its end, in which warmup_stable_decay falls."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """How warmup_stable_decay falls."""

    def num_warmup_steps(self, max_steps: int) -> int:
        return self.warmup_steps or round(self.warmup_ratio * max_steps)

    def num_decay_steps(self, max_steps: int) -> int:
        return round(self.decay_ratio * max_steps)

    @model_validator(mode="after")
    def _keeps_weights(self) -> "OptimizerSettings":
        for lr, decay in (
            (self.lr, self.weight_decay),
            *(
                (self.lr if group.lr is None else group.lr, group.weight_decay or 0.0)
                for group in self.groups
            ),
        ):
            if lr * decay >= 1:
                raise ValueError(
                    f"learner.optimizer.weight_decay: was {decay:g} with learning rate {lr:g}; "
                    "their product is the share of each weight that a step removes, and must be "
                    "below 1"
                )
        return self

    @model_validator(mode="after")
    def _has_no_idle_setting(self) -> "OptimizerSettings":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"learner.optimizer.warmup_ratio: was {self.warmup_ratio:g} beside warmup_steps "
                f"{self.warmup_steps}; give one of the two"
            )
        for name, schedules in _ACTS_UNDER.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.schedule not in schedules:
                raise ValueError(
                    f"learner.optimizer.{name}: was {value}, which does nothing under schedule "
                    f"{self.schedule}; it acts under {', '.join(schedules)}"
                )
        return self


_ACTS_UNDER = {
    "min_lr_ratio": ("linear", "cosine", "warmup_stable_decay"),
    "num_cycles": ("cosine",),
    "decay_ratio": ("warmup_stable_decay",),
    "decay_shape": ("warmup_stable_decay",),
}
