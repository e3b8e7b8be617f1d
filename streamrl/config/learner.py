"""`learner`: the batch of a step, and the machine that trains it."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from streamrl.config.section import (
    Decay,
    Device,
    Dtype,
    LearningRate,
    LearningRateOrZero,
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    Probability,
    Seconds,
    Section,
    Share,
    refuse_unless,
)
from streamrl.errors import ConfigError
from streamrl.types.ranges import MAX_GROUPS


def _is_made_at_the_end(steps: object) -> object:
    if steps in (None, 0, -1, "never"):
        raise ValueError(
            f"was {steps!r}; a checkpoint frees the groups of the buffer that it contains, so one "
            "is made at the end at least: a number above run.max_steps leaves that one alone"
        )
    return steps


class CheckpointSettings(Section):
    """When the learner saves its state, and how many it keeps."""

    every: Annotated[Positive, BeforeValidator(_is_made_at_the_end)] = 50
    """Steps between checkpoints; one is always made at the end."""
    keep: Positive = 2
    """Newest complete ones kept, beside those in abandoned/."""
    keep_best: NotNegative = 0
    """Complete ones kept besides, with the best mean of `best_by`."""
    best_by: str = "reward/mean"
    """Metric, as mean over the steps since the checkpoint before, or one of a validation, such as
    validation/mean@1."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Of `best_by`."""
    contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] = (
        "model",
        "optimizer",
        "extra",
        "hf_model",
    )
    """Parameters; AdamW's state; random generators, KL controller and moments of rewards; a Hugging
    Face folder, for `streamrl evaluate`."""
    load_contents: tuple[Literal["model", "optimizer", "extra"], ...] | None = None
    """What is loaded of the checkpoint that the run goes on from; null: all of it."""

    @property
    def is_best_validated(self) -> bool:
        """Whether `best_by` is what validations find."""
        return self.best_by.startswith("validation/")

    @property
    def loaded(self) -> tuple[str, ...]:
        """What `load_contents` means."""
        if self.load_contents is not None:
            return self.load_contents
        return tuple(content for content in self.contents if content != "hf_model")

    @field_validator("contents", "load_contents")
    @classmethod
    def _has_the_model(cls, contents: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if contents is not None and "model" not in contents:
            raise ValueError("must contain model, without which no run goes on from a checkpoint")
        return contents


class LoraSettings(Section):
    """An adapter (LoRA, arXiv 2106.09685) is trained instead of all parameters."""

    rank: Positive = 16
    """Columns of A and B."""
    alpha: PositiveNumber = 32.0
    """The product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Last parts of the names of linear layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapter's inputs, in passes with gradient."""
    publish: Literal["merged", "adapter"] = "merged"
    """Send generators all parameters, or the adapter: fewer bytes, a copy more in memory."""


class ForwardPassSettings(Section):
    """Tokens of a forward pass without gradient; null: as the role's training pass."""

    proximal: Positive | None = None
    """Of the policy before the step, where needed."""
    reference: Positive | None = None
    """Of the reference policy."""
    values: Positive | None = None
    """Of the critic before the step."""


class OffloadSettings(Section):
    """What waits in the host's memory instead of the GPU's."""

    parameters: bool = False
    """With gradients and optimizer state; the CPU makes the update."""
    optimizer: bool = False
    """Its state, but for the update."""
    activations: bool = False
    """The layers' inputs that `gradient_checkpointing` (needed) keeps."""
    reference: bool = False
    """The reference policy, copied to the GPU layer by layer."""

    def contradictions(self) -> Iterator[str]:
        if self.parameters and (self.optimizer or self.reference):
            yield f"""{"optimizer" if self.optimizer else "reference"}: does nothing beside
                parameters, which puts parameters and optimizer state of all roles on the host"""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The options that are on."""
        return tuple(name for name, is_on in self.model_dump().items() if is_on)


_is_a_size = refuse_unless(
    lambda shard: shard > 0 or shard == -1, "it must be positive, or -1 for all ranks that are left"
)


class MeshSettings(Section):
    """How many ranks share what; the sizes multiply to the number of ranks."""

    replicate: Positive = 1
    """Copies of the sharded parameters, each for other trajectories."""
    shard: Annotated[int, _is_a_size] = -1
    """Ranks that share a copy and train other trajectories; -1: all that are left."""
    sequence: Positive = 1
    """Ranks that share the tokens of trajectories."""
    tensor: Positive = 1
    """Ranks that share each matrix."""

    def sizes(self, world_size: int) -> tuple[int, int, int, int]:
        """Replicate, shard, sequence and tensor, in a world of so many ranks.

        Raises:
            ConfigError: they do not multiply to it.
        """
        others = self.replicate * self.sequence * self.tensor
        shard = world_size // others if self.shard == -1 else self.shard
        if others * shard == world_size:
            return self.replicate, shard, self.sequence, self.tensor
        product = f"replicate {self.replicate} x sequence {self.sequence} x tensor {self.tensor}"
        if self.shard == -1:
            raise ConfigError(
                f"learner.mesh: {product} is {others}, which does not divide the {world_size} "
                "ranks of the learner; learner.num_ranks, or torchrun --nproc-per-node, says how "
                "many there are"
            )
        raise ConfigError(
            f"learner.mesh: {product} x shard {shard} is {others * shard}, but the learner has "
            f"{world_size} ranks; shard -1 takes all that are left"
        )


class OptimizerGroup(Section):
    """Parameters of the policy trained otherwise than the rest."""

    parameters: Annotated[str, Field(min_length=1)]
    """Pattern of their names, such as "*.mlp.*"; `*` is any text."""
    lr: LearningRateOrZero | None = None
    """Peak, under the same schedule; 0 freezes them; null: as the rest."""
    weight_decay: NotNegativeNumber | None = None
    """Of all of them, vectors too; null: as the rest."""


class OptimizerSettings(Section):
    """AdamW and its learning rate."""

    lr: LearningRate = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator."""
    weight_decay: NotNegativeNumber = 0.01
    """Decoupled; vectors (norms, biases) are exempt."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Parameters with a rate or decay of their own; the first pattern that matches counts."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Global norm that gradients are clipped to; null: off."""
    max_skipped_updates: NotNegative = 3
    """Updates in a row that may be skipped for a gradient that is not finite."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """After the warm-up, down to `min_lr_ratio` at `run.max_steps`."""
    warmup_steps: NotNegative = 0
    """Over which the rate rises linearly from 0."""
    warmup_ratio: Probability = 0.0
    """The same in parts of `run.max_steps`."""
    min_lr_ratio: Probability = 0.0
    """The schedule's floor, in parts of `lr`."""
    num_cycles: PositiveNumber = 0.5
    """Waves of schedule cosine; 0.5 falls once."""
    decay_ratio: Share = 0.2
    """Last part of `run.max_steps`, in which warmup_stable_decay falls."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """How it falls."""

    def num_warmup_steps(self, max_steps: int) -> int:
        return self.warmup_steps or round(self.warmup_ratio * max_steps)

    def num_decay_steps(self, max_steps: int) -> int:
        return round(self.decay_ratio * max_steps)

    def contradictions(self) -> Iterator[str]:
        rates = [(self.lr, self.weight_decay)]
        for group in self.groups:
            rates += [(self.lr if group.lr is None else group.lr, group.weight_decay or 0.0)]
        for lr, decay in rates:
            if lr * decay >= 1:
                yield f"""weight_decay: was {decay:g} with learning rate {lr:g}; their product is
                    the share of each weight that a step removes, and must be below 1"""
        if self.warmup_steps and self.warmup_ratio:
            yield f"""warmup_ratio: was {self.warmup_ratio:g} beside warmup_steps
                {self.warmup_steps}; give one of the two"""
        for name in self.not_default(_ACTS_UNDER):
            if self.schedule not in _ACTS_UNDER[name]:
                yield f"""{name}: was {getattr(self, name)}, which does nothing under schedule
                    {self.schedule}; it acts under {", ".join(_ACTS_UNDER[name])}"""


_ACTS_UNDER = {
    "min_lr_ratio": ("linear", "cosine", "warmup_stable_decay"),
    "num_cycles": ("cosine",),
    "decay_ratio": ("warmup_stable_decay",),
    "decay_shape": ("warmup_stable_decay",),
}


class ProfilerSettings(Section):
    """What is recorded of chosen steps, in profiler/ of the run's folder."""

    steps: tuple[Positive, ...] = ()
    """Steps, from 1, with a trace of torch's profiler each."""
    ranks: tuple[NotNegative, ...] = (0,)
    """Ranks that record; empty: all."""
    memory: bool = False
    """Record allocations of GPU memory, too."""
    nvtx: bool = False
    """Let Nsight Systems capture `steps` instead: `nsys profile --capture-range=cudaProfilerApi
    streamrl learner ...`."""


FlashAttentionVersion: TypeAlias = Literal["auto", 2, 3, 4]


class LearnerSettings(Section):
    """The batch of a step, and the machine that trains it."""

    groups_per_step: Annotated[int, Field(gt=0, le=MAX_GROUPS)] = 32
    """Groups of a batch, which makes one policy version."""
    epochs: Positive = 1
    """Passes over a batch."""
    updates_per_batch: Positive = 1
    """Optimizer updates in a pass, each on a mini-batch of whole groups."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens of a forward and backward pass; a shared prompt counts once."""
    max_tokens_per_forward_pass: ForwardPassSettings = ForwardPassSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    lora: LoraSettings | None = None
    """Null trains all parameters."""
    freeze_vision_tower: bool = False
    """Train the language model of a vision-language model alone."""
    mesh: MeshSettings = MeshSettings()
    num_ranks: Positive = 1
    """Ranks that `streamrl learner` starts on this machine."""
    rank_deadline_s: Seconds = 60.0
    """How long a rank may report nothing before the others end."""
    dtype: Dtype = "float32"
    """Of forward and backward; sums, master weights and optimizer are float32."""
    device: Device = "auto"
    """As `generator.device`."""
    num_threads: NotNegative = 0
    """CPU threads; 0 is torch's choice."""
    profiler: ProfilerSettings = ProfilerSettings()
    peak_tflops: PositiveNumber | None = None
    """What a device computes in `dtype`, in 10^12 operations/s, for `learner/mfu`."""
    sum_each_micro_batch: bool = True
    """Sum gradients over ranks after every micro-batch; false: once an update, for less traffic and
    more memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile layers by torch.compile: faster passes after a slow first one. auto: on a GPU with a
    compiler, in runs of 300 steps and more."""
    liger_layers: bool | Literal["auto"] = "auto"
    """Norms, rotary positions and MLPs by liger-kernel, where layers are not compiled. auto: on a
    GPU where it is installed and computes alike."""
    flash_attention: FlashAttentionVersion = "auto"
    """On a GPU. auto: 3 or 4 where installed and made for the GPU, else 2, flash-attn's or torch's.
    """
    gradient_checkpointing: bool | Positive = False
    """Recompute activations in the backward pass, for less memory; n: of every n-th layer."""
    check_packing: bool = True
    """At start, compare packing with plain transformers; run unpacked what it changes."""
    offload: OffloadSettings = OffloadSettings()
    report_entropy: bool = True
    """Measure the policy's entropy each step."""

    def contradictions(self) -> Iterator[str]:
        if self.offload.activations and not self.gradient_checkpointing:
            yield """learner.offload.activations: moves the inputs of layers that
                gradient_checkpointing keeps, and that is false: set it to true"""

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
