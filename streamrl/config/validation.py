"""`validation`: which versions are validated, how they are sampled, and what follows from it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from streamrl.config.generator import GeneratorSettings
from streamrl.config.section import (
    NotNegative,
    NotNegativeNumber,
    Positive,
    Seconds,
    Section,
    Share,
    SomeOf,
    overlaid,
    some_of,
)

MAX_COST_FRAC = 0.05
"""Largest share of the time that `validation.every: auto` spends on validations."""
_OWN = {
    name: f"has no effect there; set validation.{name}"
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "num_samples")
}
"""Settings of `validation` that replace those of `generator`."""
_OWN["group_size"] = _OWN["num_samples"]


class EarlyStopSettings(Section):
    """When a run ends because validations no longer improve."""

    patience: NotNegative = 0
    """Consecutive validations without improvement after which the run ends; 0: never."""
    min_improvement: NotNegativeNumber = 0.0
    """Smallest improvement that counts."""


class ValidationSettings(Section):
    """A process that scores policy versions on held-out prompts during the run."""

    every: NotNegative | Literal["auto"] | None = None
    """Versions between validations; 0: none; auto: 5 % of the time. Null: auto with
    `data.eval_source` and engine hf, otherwise 0."""
    at_start: bool = True
    """Validate the first version."""
    at_end: bool = True
    """Validate the last version; the learner waits for it."""
    end_wait_s: Seconds = 1800.0
    """Longest wait of the learner for that, in seconds."""
    num_samples: Positive = 1
    """Responses per prompt: the k of mean@k, pass@k and majority@k."""
    num_prompts: Positive | None = None
    """Number of held-out prompts, from the first on; null: `data.num_eval_prompts`."""
    temperature: NotNegativeNumber = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Share = 1.0
    """As in `generator`."""
    top_k: NotNegative = 0
    """As in `generator`."""
    max_new_tokens: Positive | None = None
    """Longest completion in tokens; null: `generator.max_new_tokens`."""
    pass_reward: float = 1.0
    """Smallest reward at which a response passes."""
    generator: Annotated[dict[str, Any], SomeOf(GeneratorSettings)] = Field(default_factory=dict)
    """Settings of the validator's engine that differ from `generator`, such as {device: "cuda:1",
    max_num_seqs: 32}."""
    keep: Positive = 20
    """Number of newest validations whose responses are kept in validation/, in addition to the
    first."""
    metric: str | None = None
    """Metric that `early_stop` compares; null: validation/mean@k."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether larger or smaller values of `metric` are better."""
    early_stop: EarlyStopSettings = EarlyStopSettings()

    @property
    def watched_metric(self) -> str:
        """`metric` with its default filled in."""
        return self.metric or f"validation/mean@{self.num_samples}"

    def next_version(self, policy_version: int) -> int:
        """The next version to validate after this one."""
        every = self.every if isinstance(self.every, int) and self.every else 1
        return (policy_version // every + 1) * every

    @property
    def rests(self) -> bool:
        """Whether the validator pauses after each validation."""
        return not isinstance(self.every, int)

    def rest_s(self, validation_s: float) -> float:
        """How long it pauses after a validation of this length, in seconds."""
        return validation_s * (1 / MAX_COST_FRAC - 1) if self.rests else 0.0

    def engine_settings(self, generator: GeneratorSettings) -> GeneratorSettings:
        """The `generator` settings of the validator's engine and sampling. Raises ValidationError
        if `validation.generator` has an unknown setting or a bad value."""
        sampling = {
            "group_size": self.num_samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.max_new_tokens is not None:
            sampling["max_new_tokens"] = self.max_new_tokens
        values = overlaid(generator.model_dump(exclude_unset=True), self.generator) | sampling
        place = ("validation", "generator")
        return some_of(GeneratorSettings, values, place, self.generator, _OWN)
