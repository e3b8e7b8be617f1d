"""`learner`: the batch of a step, and the machine that trains it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.learner.checkpoint import CheckpointSettings
from streamrl.config.learner.lora import LoraSettings
from streamrl.config.learner.memory import ForwardPassSettings, OffloadSettings
from streamrl.config.learner.mesh import MeshSettings
from streamrl.config.learner.optimizer import OptimizerSettings
from streamrl.config.learner.profiler import ProfilerSettings
from streamrl.config.numbers import Device, NotNegative, Positive, Seconds
from streamrl.config.section import Section
from streamrl.errors import ConfigError
from streamrl.types.ranges import MAX_GROUPS


class LearnerSettings(Section):
    """The batch of a step, and the machine that trains it."""

    groups_per_step: Annotated[int, Field(gt=0, le=MAX_GROUPS)] = 32
    """Trajectory groups per batch; a batch is one policy version."""
    epochs: Positive = 1
    """Passes over a batch."""
    updates_per_batch: Positive = 1
    """Optimizer updates in one pass over a batch, each on a mini-batch of whole groups."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens (prompt and response) of one forward and backward pass; those of a prompt that is
    computed once for several trajectories count once."""
    max_tokens_per_forward_pass: ForwardPassSettings = ForwardPassSettings()
    """The same for passes without gradient, by role."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of the policy."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saved states of the run."""
    lora: LoraSettings | None = None
    """Train an adapter of low rank; null trains all parameters."""
    freeze_vision_tower: bool = False
    """Leave the part of a vision-language model that sees as it is, and train the rest."""
    mesh: MeshSettings = MeshSettings()
    """The ranks of the learner; one without torchrun."""
    num_ranks: Positive = 1
    """Ranks that `streamrl learner` starts on this machine; torchrun starts them on several."""
    rank_deadline_s: Seconds = 60.0
    """How long a rank of the learner may report nothing before the others end."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; sums, master weights and optimizer stay float32."""
    device: Device = "auto"
    """cpu, cuda, cuda:0, ...; auto takes a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads of the learner; 0 leaves torch's choice."""
    profiler: ProfilerSettings = ProfilerSettings()
    """Traces of chosen steps."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What one device computes in `dtype` at most, in 10^12 operations per second, for
    `learner/mfu`; unset: known for common GPUs."""
    sum_each_micro_batch: bool = True
    """Sum gradients over the ranks after every micro-batch; false: once an update, after the last,
    which is less traffic and costs each rank the memory of a whole float32 gradient."""
    compile: bool = False
    """Compile the decoder's layers by torch.compile: faster passes after a slow first one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    check_packing: bool = True
    """At start, compare packed with plain transformers; run unpacked what packing changes."""
    offload: OffloadSettings = OffloadSettings()
    """What waits in the host's memory instead of the GPU's."""
    report_entropy: bool = True
    """Measure the policy's entropy each step, also where the loss does not need it."""

    @model_validator(mode="after")
    def _keeps_what_it_offloads(self) -> "LearnerSettings":
        if self.offload.activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload.activations moves the inputs of layers that gradient_checkpointing keeps, "
                "and gradient_checkpointing is false: set it to true"
            )
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer updates of one batch."""
        return self.epochs * self.updates_per_batch

    def require_ranks(self, num_ranks: int) -> None:
        """
        Raises:
            ConfigError: the sizes of `mesh`, or the batch, do not fit so many ranks.
        """
        replicate, shard, _, _ = self.mesh.sizes(num_ranks)
        if replicate * shard > self.groups_per_step:
            raise ConfigError(
                f"learner.groups_per_step {self.groups_per_step} is less than the "
                f"{replicate * shard} ranks that each train groups of their own: start fewer, or "
                "raise it"
            )


def setting_without_pass(
    learner: LearnerSettings, algorithm: AlgorithmSettings, needs_policy_pass: bool
) -> str | None:
    """What is wrong with the first setting that is for a pass which is not made; None if each acts.

    `needs_policy_pass` is `RunConfig.needs_policy_pass`.
    """
    limits = learner.max_tokens_per_forward_pass
    if limits.proximal is not None and not needs_policy_pass:
        return (
            f"learner.max_tokens_per_forward_pass.proximal {limits.proximal} has no pass: with "
            "these settings the training pass yields the proximal log-probabilities; "
            "learner.updates_per_batch or learner.epochs > 1 makes one"
        )
    if limits.values is not None and not algorithm.needs_values:
        return (
            f"learner.max_tokens_per_forward_pass.values {limits.values} has no critic: "
            f"algorithm.advantage is {algorithm.advantage}; only gae has one"
        )
    if limits.reference is not None and not algorithm.needs_reference_logprobs:
        return (
            f"learner.max_tokens_per_forward_pass.reference {limits.reference} has no pass of a "
            "reference policy: algorithm.kl_loss.coef (but for kind full) or "
            "algorithm.kl_reward.coef > 0 makes one"
        )
    if learner.offload.reference and not algorithm.needs_reference:
        return (
            "learner.offload.reference has no reference policy to move: algorithm.kl_loss.coef and "
            "algorithm.kl_reward.coef are 0"
        )
    return None
