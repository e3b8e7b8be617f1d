"""`validation`: when a version is validated, how it is sampled, and what the run does by it."""

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
"""Of the time, at most, that `validation.every: auto` validates."""
_OWN = {
    name: f"has no effect there; set validation.{name}"
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "num_samples")
}
"""Of `validation`, instead of what `generator` has."""
_OWN["group_size"] = _OWN["num_samples"]


class EarlyStopSettings(Section):
    """When a run ends because validations get no better."""

    patience: NotNegative = 0
    """Validations in a row without a better one; 0: never."""
    min_improvement: NotNegativeNumber = 0.0
    """What a better one must exceed the best by."""


class ValidationSettings(Section):
    """A process that scores versions of the policy on held-out prompts while the run goes on."""

    every: NotNegative | Literal["auto"] | None = None
    """Versions between validations; 0: none. `auto`: at most 5 % of the time. Null: `auto` where
    `data.eval_source` is given and `generator.engine` is hf, else 0."""
    at_start: bool = True
    """Validate the first version."""
    at_end: bool = True
    """Validate the last version, for which the learner waits."""
    end_wait_s: Seconds = 1800.0
    """Its longest wait."""
    num_samples: Positive = 1
    """Responses to a prompt: the k of mean@k, pass@k and majority@k."""
    num_prompts: Positive | None = None
    """The first held-out ones; null: `data.num_eval_prompts`."""
    temperature: NotNegativeNumber = 0.0
    """0 is greedy."""
    top_p: Share = 1.0
    """As of `generator`."""
    top_k: NotNegative = 0
    """As of `generator`."""
    max_new_tokens: Positive | None = None
    """Null: `generator.max_new_tokens`."""
    pass_reward: float = 1.0
    """From this reward on a response passes."""
    generator: Annotated[dict[str, Any], SomeOf(GeneratorSettings)] = Field(default_factory=dict)
    """Settings of the validator's engine other than `generator`'s, such as {device: "cuda:1",
    max_num_seqs: 32}."""
    keep: Positive = 20
    """Newest validations whose responses are kept in validation/, beside the first."""
    metric: str | None = None
    """What `early_stop` compares; null: validation/mean@k."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Of `metric`."""
    early_stop: EarlyStopSettings = EarlyStopSettings()

    @property
    def watched_metric(self) -> str:
        """What `metric` means."""
        return self.metric or f"validation/mean@{self.num_samples}"

    def next_version(self, policy_version: int) -> int:
        """The first version that is due after this one."""
        every = self.every if isinstance(self.every, int) and self.every else 1
        return (policy_version // every + 1) * every

    @property
    def rests(self) -> bool:
        """Whether the validator rests after each validation."""
        return not isinstance(self.every, int)

    def rest_s(self, validation_s: float) -> float:
        """How long, after a validation that took so long."""
        return validation_s * (1 / MAX_COST_FRAC - 1) if self.rests else 0.0

    def engine_settings(self, generator: GeneratorSettings) -> GeneratorSettings:
        """`generator`, as the validator's engine and sampling have it.

        Raises:
            ValidationError: `validation.generator` names no setting of it, or one with a bad value.
        """
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
