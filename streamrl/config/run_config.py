"""`RunConfig`: the whole file of one run, and the contradictions between its sections.

Invariant: a `RunConfig` that exists can run; a setting that would deadlock, overflow or silently do
nothing together with another one is refused with a sentence naming both, or naming what would make
it act.
"""

from typing import Any

from pydantic import ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails

from streamrl.config.addresses import require_port
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.losses import LossSettings
from streamrl.config.algorithm.unused_settings import refusals
from streamrl.config.buffer import BufferSettings
from streamrl.config.contradictions import contradictions
from streamrl.config.data import DataSettings
from streamrl.config.environments import EnvironmentEntry, EnvironmentSettings, entries_of
from streamrl.config.generator import GeneratorSettings
from streamrl.config.learner import LearnerSettings, OptimizerSettings
from streamrl.config.model import ModelSettings
from streamrl.config.run import ClusterSettings, ParitySettings, RunSettings
from streamrl.config.section import Section
from streamrl.config.tracking import TrackingSettings
from streamrl.config.validation import ValidationSettings
from streamrl.config.weights import WeightSettings

# Of `streamrl.types.PackedGroup`, `TopLogprobs` and `TokenSets`, the numbers narrowed for the way.
_COUNT_BYTES, _LOGPROB_BYTES, _TAUGHT_LOGPROB_BYTES = 2, 4, 2


SECTIONS_ALONE = "sections alone"
"""Validation context that skips the check for contradictions between sections."""


class RunConfig(Section):
    """One section per owner; only `data.source` and `model.path` have no default."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    data: DataSettings
    generator: GeneratorSettings = GeneratorSettings()
    environments: tuple[EnvironmentSettings, ...] = ()
    buffer: BufferSettings = BufferSettings()
    learner: LearnerSettings = LearnerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    weights: WeightSettings = WeightSettings()
    parity: ParitySettings = ParitySettings()
    validation: ValidationSettings = ValidationSettings()
    tracking: TrackingSettings = TrackingSettings()
    cluster: ClusterSettings = ClusterSettings()

    def shown(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """The settings for trackers and reports, which others read: without values that may hold
        keys."""
        private = {"generator": {"mcp_servers": {"__all__": {"headers", "environment"}}}}
        return self.model_dump(
            mode="json",
            exclude={**private, "validation": private},
            exclude_defaults=exclude_defaults,
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        longest = self.data.max_prompt_length + self.generator.max_new_tokens
        return self.generator.max_model_len or longest

    @property
    def stop_within_s(self) -> float:
        """Seconds from the first signal to the end of every process: `run.stop_s`, or if longer
        what generators need to drain and to end."""
        return max(self.run.stop_s, self.generator.drain_s + 15.0)

    @property
    def loss_config(self) -> LossSettings:
        """`algorithm.loss_config` with the default of `loss_scale_factor` filled in."""
        numbers = self.algorithm.loss_config
        scale = numbers.loss_scale_factor or self.generator.max_new_tokens
        return numbers.model_copy(update={"loss_scale_factor": float(scale)})

    @property
    def critic_optimizer(self) -> OptimizerSettings:
        """`learner.optimizer`, overridden by the critic's settings in `algorithm.value`."""
        names = {"lr", "betas", "eps", "weight_decay", "max_grad_norm"}
        own = {name: getattr(self.algorithm.value, name) for name in names}
        given = {name: value for name, value in own.items() if value is not None}
        return self.learner.optimizer.model_copy(update={**given, "groups": ()})

    @property
    def needs_policy_pass(self) -> bool:
        """Whether the policy makes a pass before the first update. KL in the reward and ratios in
        the advantage need it; so does a proximal policy with several updates per batch, or one
        whose weights depend on the whole batch."""
        algorithm = self.algorithm
        is_anchor = self.learner.num_updates > 1 or algorithm.corrects_as_a_whole
        is_in_credit = algorithm.kl_reward.coef > 0 or algorithm.needs_ratios
        return is_in_credit or (algorithm.proximal == "recompute" and is_anchor)

    @property
    def reads_validations(self) -> bool:
        """Whether validations decide when the run ends or which checkpoints are kept."""
        checkpoint = self.learner.checkpoint
        is_best_validated = bool(checkpoint.keep_best) and checkpoint.is_best_validated
        return bool(self.validation.early_stop.patience) or is_best_validated

    @property
    def is_validated(self) -> bool:
        """Whether a validator scores versions during the run."""
        if self.validation.every is not None:
            return self.validation.every != 0
        return self.generator.engine == "hf" and all(
            entry.data.eval_sources and entry.environment != "agent" for entry in self.entries
        )

    @property
    def is_evaluated(self) -> bool:
        """Whether a launch scores the final checkpoint; not with agents, which run only in
        generators."""
        return self.run.evaluate and any(e.environment != "agent" for e in self.entries)

    @property
    def final_is_validated(self) -> bool:
        """Whether the validation of the last version equals `streamrl evaluate`: one greedy
        response to each of the same prompts, by the same engine."""
        v, own = self.validation, {"device", "max_num_seqs", "num_threads"}
        is_greedy = v.num_samples == 1 and v.temperature == 0
        alike = (
            v.num_prompts in (None, self.data.num_eval_prompts),
            v.max_new_tokens in (None, self.generator.max_new_tokens),
            v.generator.keys() <= own,
        )
        return self.is_validated and v.at_end and is_greedy and all(alike)

    def for_validator(self) -> "RunConfig":
        """A copy in which `generator` has the validator's sampling and engine."""
        generator = self.validation.engine_settings(self.generator)
        wanted = self.validation.num_prompts or self.data.num_eval_prompts
        return self.with_values(generator=generator, data={"num_eval_prompts": wanted})

    def require_ports(self) -> None:
        """Raise ConfigError if the port of an address that a generator needs is still to be
        picked."""
        if self.buffer.binds_url:
            require_port("buffer.url", self.buffer.url)
        if self.weights.transport != "store":
            require_port("weights.address", self.weights.address)

    @property
    def entries(self) -> tuple[EnvironmentEntry, ...]:
        """The environments of the run; that of `generator` if `environments` is empty."""
        return entries_of(self)

    @property
    def max_group_size(self) -> int:
        """Episodes of the largest group."""
        return max(entry.group_size for entry in self.entries)

    @property
    def max_num_episodes(self) -> int:
        """Episodes of one group, including those sampled in addition to its siblings."""
        beside = self.generator.oversample.num_siblings + self.algorithm.needs_greedy_rewards
        return self.max_group_size + beside

    @property
    def mean_group_size(self) -> float:
        """Mean number of episodes of a group, by the weights of the environments."""
        total = sum(entry.weight for entry in self.entries)
        return sum(entry.weight * entry.group_size for entry in self.entries) / total

    @property
    def num_top_logprobs(self) -> int:
        """Number of candidates per token whose log-probabilities the loss uses."""
        return getattr(self.algorithm.loss_config, "divergence_topk", 0)

    def group_bytes(
        self, num_tokens: int, *, num_kept: int = 1, id_bytes: int = 2, expert_bytes: int = 1
    ) -> int:
        """Bytes of the largest group with so many tokens per trajectory, except a few for names and
        for each turn. `num_kept` is the size of a token's sampling mask; `id_bytes` is that of an
        id, and `expert_bytes` that of a token's experts, if these are kept."""
        per_token = id_bytes + _LOGPROB_BYTES
        if self.generator.keep_sampling_mask:
            per_token += _COUNT_BYTES + id_bytes * num_kept
        if self.num_top_logprobs:
            per_token += _COUNT_BYTES + (id_bytes + _LOGPROB_BYTES) * self.num_top_logprobs
        if self.algorithm.records_experts:
            per_token += 1 + expert_bytes
        if self.algorithm.distillation is not None and self.algorithm.distillation.by_url:
            per_token += _LOGPROB_BYTES
            if top_k := self.algorithm.num_taught:
                per_token += _COUNT_BYTES + (id_bytes + _TAUGHT_LOGPROB_BYTES) * top_k
        return self.max_group_size * num_tokens * per_token

    @model_validator(mode="after")
    def _is_consistent_as_a_whole(self, info: ValidationInfo) -> "RunConfig":
        if info.context == SECTIONS_ALONE:
            # What has some of another section's settings is read beside that one.
            entries_of(self)
            self.validation.engine_settings(self.generator)
        else:
            require_consistent(self)
        return self


def require_consistent(config: RunConfig) -> None:
    """
    Raises:
        ValidationError: sections contradict each other, or settings have no effect.
    """
    refused = list(refusals(config.algorithm, config.learner.num_updates))
    if sentences := "\n".join(contradictions(config)):
        error = {"error": ValueError(sentences)}
        refused.insert(0, InitErrorDetails(type="value_error", loc=(), input=None, ctx=error))
    if refused:
        raise ValidationError.from_exception_data("RunConfig", refused)
