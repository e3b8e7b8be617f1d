"""`RunConfig`: the whole file of one run, and the contradictions between its sections.

Invariant: a `RunConfig` that exists can run; a setting that would deadlock, overflow or silently do
nothing together with another one is refused with a sentence naming both, or naming what would make
it act.
"""

from collections.abc import Callable

from pydantic import ValidationError, model_validator

from streamrl.config.addresses import host_of, is_loopback, port_of
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.inert import refusals
from streamrl.config.algorithm.losses import LossSettings
from streamrl.config.buffer import BufferSettings
from streamrl.config.data import DataSettings
from streamrl.config.generator import GeneratorSettings
from streamrl.config.learner import LearnerSettings, setting_without_pass
from streamrl.config.model import ModelSettings
from streamrl.config.parity import ParitySettings
from streamrl.config.run import RunSettings
from streamrl.config.section import Section
from streamrl.config.tracking import TrackingSettings
from streamrl.config.weights import WeightSettings

# Its id, mask, log-probability and policy version, as `streamrl.types.PackedGroup` holds them.
_TOKEN_BYTES = 4 + 1 + 4 + 4


class RunConfig(Section):
    """One section per owner; only `data.source` and `model.path` have no default."""

    run: RunSettings = RunSettings()
    """The run as a whole."""
    model: ModelSettings
    """The model that is trained."""
    data: DataSettings
    """Prompts and rewards."""
    generator: GeneratorSettings = GeneratorSettings()
    """Sampling."""
    buffer: BufferSettings = BufferSettings()
    """Where trajectory groups wait."""
    learner: LearnerSettings = LearnerSettings()
    """Training."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Everything between trajectories and the gradient."""
    weights: WeightSettings = WeightSettings()
    """How weights reach the generators."""
    parity: ParitySettings = ParitySettings()
    """How far engine and learner may disagree."""
    tracking: TrackingSettings = TrackingSettings()
    """Where metrics go."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt plus completion."""
        longest = self.data.max_prompt_length + self.generator.max_new_tokens
        return self.generator.max_model_len or longest

    @property
    def loss_config(self) -> LossSettings:
        """`algorithm.loss_config` with the default of `loss_scale_factor`."""
        numbers = self.algorithm.loss_config
        scale = numbers.loss_scale_factor or self.generator.max_new_tokens
        return numbers.model_copy(update={"loss_scale_factor": float(scale)})

    @property
    def needs_policy_pass(self) -> bool:
        """Whether a pass of the policy comes before the first update: KL in the reward needs it,
        and a proximal policy that stays where the policy was while several updates move it, or
        that weighs the batch as a whole."""
        algorithm = self.algorithm
        is_anchor = self.learner.num_updates > 1 or algorithm.corrects_as_a_whole
        return algorithm.kl_reward.coef > 0 or (algorithm.proximal == "recompute" and is_anchor)

    def group_bytes(self, num_tokens: int) -> int:
        """Bytes of a group whose trajectories have so many tokens each, without a few of names."""
        return self.generator.group_size * num_tokens * _TOKEN_BYTES

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> "RunConfig":
        if sentences := [sentence for find in _CONTRADICTIONS if (sentence := find(self))]:
            raise ValueError("\n".join(sentences))
        if refused := list(refusals(self.algorithm, self.learner.num_updates)):
            raise ValidationError.from_exception_data("RunConfig", refused)
        return self


def _micro_batch_too_small(c: RunConfig) -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    by_role = c.learner.max_tokens_per_forward_pass.model_dump(exclude_none=True)
    limits = {f"learner.max_tokens_per_forward_pass.{role}": n for role, n in by_role.items()}
    limits |= {"learner.max_tokens_per_micro_batch": c.learner.max_tokens_per_micro_batch}
    setting = min(limits, key=limits.__getitem__)
    if longest <= limits[setting]:
        return None
    return (
        f"{setting} {limits[setting]} cannot hold one trajectory: data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens} = "
        f"{longest}"
    )


def _memory_setting_without_its_pass(c: RunConfig) -> str | None:
    return setting_without_pass(c.learner, c.algorithm, c.needs_policy_pass)


def _more_updates_than_groups(c: RunConfig) -> str | None:
    if c.learner.updates_per_batch <= c.learner.groups_per_step:
        return None
    return (
        f"learner.updates_per_batch {c.learner.updates_per_batch} is more than "
        f"learner.groups_per_step {c.learner.groups_per_step}: each update trains whole groups"
    )


def _model_len_too_short(c: RunConfig) -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    if c.max_model_len >= longest:
        return None
    return (
        f"generator.max_model_len {c.max_model_len} is shorter than data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens}"
    )


def _min_tokens_above_max(c: RunConfig) -> str | None:
    if c.generator.min_new_tokens <= c.generator.max_new_tokens:
        return None
    return (
        f"generator.min_new_tokens {c.generator.min_new_tokens} is above generator.max_new_tokens "
        f"{c.generator.max_new_tokens}"
    )


def _greedy_siblings(c: RunConfig) -> str | None:
    if c.generator.temperature > 0:
        return None
    return (
        f"generator.temperature 0 makes the generator.group_size {c.generator.group_size} siblings "
        "of a prompt alike and leaves nothing to learn from; it must be > 0 for training"
    )


def _weights_too_rare(c: RunConfig) -> str | None:
    if c.weights.publish_every <= c.buffer.max_staleness + 1:
        return None
    return (
        f"weights.publish_every {c.weights.publish_every} with buffer.max_staleness "
        f"{c.buffer.max_staleness} would deadlock: generators would wait for a version that is not "
        f"published; publish_every may be at most {c.buffer.max_staleness + 1}"
    )


def _nccl_without_gpu(c: RunConfig) -> str | None:
    on_cpu = [
        f"{owner}.device"
        for owner, device in (("learner", c.learner.device), ("generator", c.generator.device))
        if device == "cpu"
    ]
    if c.weights.backend != "nccl" or not on_cpu:
        return None
    return f"weights.backend nccl needs GPUs at both ends, but {on_cpu[0]} is cpu"


def _shared_between_gpu_and_cpu(c: RunConfig) -> str | None:
    crosses = c.learner.device.startswith("cuda") and c.generator.device == "cpu"
    if c.weights.backend != "shared" or not crosses:
        return None
    return (
        "weights.backend shared needs generators on the learner's GPU, but learner.device is "
        f"{c.learner.device} and generator.device is cpu; auto, or gloo, crosses"
    )


def _weights_without_keys(c: RunConfig) -> str | None:
    if c.buffer.curve is not None or is_loopback(c.weights.address):
        return None
    return (
        f"weights.address: was {c.weights.address!r}, which other machines can reach; that needs "
        "keys: make them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
    )


def _epochs_not_counted(c: RunConfig) -> str | None:
    """`load_config` counts them, and leaves none."""
    if c.run.total_epochs is None:
        return None
    return (
        f"run.total_epochs {c.run.total_epochs:g} is not counted in steps: read the configuration "
        "with load_config, or set run.max_steps"
    )


def _warmup_longer_than_run(c: RunConfig) -> str | None:
    if c.learner.optimizer.warmup_steps <= c.run.max_steps:
        return None
    return (
        f"learner.optimizer.warmup_steps {c.learner.optimizer.warmup_steps} is longer than "
        f"run.max_steps {c.run.max_steps}"
    )


def _decay_within_warmup(c: RunConfig) -> str | None:
    settings, num_steps = c.learner.optimizer, c.run.max_steps
    num_warmup = settings.num_warmup_steps(num_steps)
    num_decay = settings.num_decay_steps(num_steps)
    if settings.schedule != "warmup_stable_decay" or num_warmup + num_decay <= num_steps:
        return None
    return (
        f"learner.optimizer.decay_ratio {settings.decay_ratio:g} begins within the warm-up: "
        f"{num_warmup} steps of warm-up and {num_decay} of decay are more than run.max_steps "
        f"{num_steps}"
    )


def _warmup_without_a_critic(c: RunConfig) -> str | None:
    warmup = c.algorithm.value.critic_warmup
    if not warmup or (c.algorithm.needs_values and warmup < c.run.max_steps):
        return None
    if not c.algorithm.needs_values:
        return (
            f"algorithm.value.critic_warmup {warmup} has no critic to warm up: "
            f"algorithm.advantage is {c.algorithm.advantage}; only gae has one"
        )
    return (
        f"algorithm.value.critic_warmup {warmup} leaves none of run.max_steps {c.run.max_steps} "
        "to the policy"
    )


def _alone_in_its_group(c: RunConfig) -> str | None:
    if c.generator.group_size > 1 or c.algorithm.advantage not in _COMPARE_SIBLINGS:
        return None
    return (
        f"algorithm.advantage {c.algorithm.advantage} compares siblings, and with "
        "generator.group_size 1 every advantage would be 0; use reinforce_plus_plus, or a group"
    )


def _groups_too_large(c: RunConfig) -> str | None:
    smallest = c.group_bytes(1 + max(1, c.generator.min_new_tokens))
    if smallest <= c.buffer.max_group_bytes:
        return None
    return (
        f"buffer.max_group_bytes {c.buffer.max_group_bytes} refuses every group: with "
        f"generator.group_size {c.generator.group_size} the smallest has {smallest} bytes, and one "
        f"of generator.max_model_len {c.max_model_len} tokens {c.group_bytes(c.max_model_len)}"
    )


def _one_address(c: RunConfig) -> str | None:
    buffer, weights = c.buffer.url, c.weights.address
    if not c.buffer.has_daemon or not 0 < port_of(buffer) == port_of(weights):
        return None
    if host_of(buffer) != host_of(weights) and not (is_loopback(buffer) and is_loopback(weights)):
        return None
    return (
        f"buffer.url {buffer} and weights.address {weights} are one port, where the buffer and the "
        "learner listen each: give one of them another"
    )


def _evaluation_without_a_model(c: RunConfig) -> str | None:
    if not c.run.evaluate or "hf_model" in c.learner.checkpoint.contents:
        return None
    return (
        "run.evaluate scores the Hugging Face folder in the last checkpoint, and "
        "learner.checkpoint.contents has no hf_model: add it, or set run.evaluate=false"
    )


_COMPARE_SIBLINGS = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo")

_CONTRADICTIONS: tuple[Callable[[RunConfig], str | None], ...] = (
    _micro_batch_too_small,
    _memory_setting_without_its_pass,
    _more_updates_than_groups,
    _model_len_too_short,
    _min_tokens_above_max,
    _greedy_siblings,
    _weights_too_rare,
    _nccl_without_gpu,
    _shared_between_gpu_and_cpu,
    _weights_without_keys,
    _epochs_not_counted,
    _warmup_longer_than_run,
    _decay_within_warmup,
    _warmup_without_a_critic,
    _alone_in_its_group,
    _groups_too_large,
    _one_address,
    _evaluation_without_a_model,
)
