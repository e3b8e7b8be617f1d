"""`learner`: the batch of a step, and how and on what it is trained."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

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

_is_made_at_the_end = refuse_unless(
    lambda steps: steps > 0,
    "it must be at least 1; above run.max_steps the last step alone makes a checkpoint",
)


class CheckpointSettings(Section):
    """When the learner saves checkpoints, and how many it keeps."""

    every: Annotated[int, _is_made_at_the_end, Field(gt=0)] = 50
    """Steps between checkpoints; the last step always makes one."""
    keep: Positive = 2
    """Number of newest complete checkpoints to keep; those in abandoned/ do not count."""
    keep_best: NotNegative = 0
    """Number of complete checkpoints to keep in addition: those with the best `best_by`."""
    best_by: str = "reward/mean"
    """Metric that ranks checkpoints: its mean since the previous checkpoint, or one of validations,
    such as validation/mean@1."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether larger or smaller values of `best_by` are better."""
    contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] = (
        "model",
        "optimizer",
        "extra",
        "hf_model",
    )
    """What is saved: parameters; AdamW's state; random generators and controllers; a Hugging Face
    folder, for `streamrl evaluate`."""
    load_contents: tuple[Literal["model", "optimizer", "extra"], ...] | None = None
    """What is loaded when the run resumes; null: all."""

    @property
    def is_best_validated(self) -> bool:
        """Whether `best_by` is a metric of validations."""
        return self.best_by.startswith("validation/")

    @property
    def loaded(self) -> tuple[str, ...]:
        """The contents to load, with the default of `load_contents` filled in."""
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
    """Train an adapter (LoRA, arXiv 2106.09685) instead of all parameters."""

    rank: Positive = 16
    """Rank of the matrices A and B."""
    alpha: PositiveNumber = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Last parts of the names of the linear layers that get an adapter."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's inputs, in passes with gradient."""
    publish: Literal["merged", "adapter"] = "merged"
    """What generators get: all parameters with the adapter merged in, or the adapter alone."""


class ForwardPassSettings(Section):
    """Tokens per forward pass without gradient; null: as in the training pass of the same model."""

    proximal: Positive | None = None
    """The policy before the step, if its pass is needed."""
    reference: Positive | None = None
    """The reference policy."""
    values: Positive | None = None
    """The critic before the step."""


class OffloadSettings(Section):
    """What is kept in host memory instead of GPU memory while it is not in use."""

    parameters: bool = False
    """Parameters, gradients and optimizer state; the CPU computes the update."""
    optimizer: bool = False
    """The optimizer's state, except during the update."""
    activations: bool = False
    """The layer inputs that `gradient_checkpointing` (required) keeps."""
    reference: bool = False
    """The reference policy, which is copied to the GPU layer by layer."""

    def contradictions(self) -> Iterator[str]:
        if self.parameters and (self.optimizer or self.reference):
            yield f"""{"optimizer" if self.optimizer else "reference"}: does nothing beside
                parameters, which puts parameters and optimizer state of all roles on the host"""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the options that are on."""
        return tuple(name for name, is_on in self.model_dump().items() if is_on)


_is_a_size = refuse_unless(
    lambda shard: shard > 0 or shard == -1, "it must be positive, or -1 for all ranks that are left"
)


class MeshSettings(Section):
    """How the ranks divide the work; the product of the sizes is the number of ranks."""

    replicate: Positive = 1
    """Number of copies of the sharded parameters, each of which trains different trajectories."""
    shard: Annotated[int, _is_a_size] = -1
    """Ranks that shard one copy and train different trajectories; -1: all remaining ranks."""
    sequence: Positive = 1
    """Ranks that divide the tokens of trajectories (sequence parallelism)."""
    tensor: Positive = 1
    """Ranks that divide each matrix (tensor parallelism)."""

    def sizes(self, world_size: int) -> tuple[int, int, int, int]:
        """The sizes (replicate, shard, sequence, tensor) for so many ranks. Raises ConfigError if
        their product is another number."""
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
    """Parameters of the policy with their own learning rate or weight decay."""

    parameters: Annotated[str, Field(min_length=1)]
    """Pattern of the parameters' names, such as "*.mlp.*"; `*` matches any text."""
    lr: LearningRateOrZero | None = None
    """Peak learning rate, with the same schedule; 0: frozen; null: as for the rest."""
    weight_decay: NotNegativeNumber | None = None
    """Weight decay of all of them, vectors included; null: as for the rest."""


class OptimizerSettings(Section):
    """AdamW and its learning rate."""

    lr: LearningRate = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NotNegativeNumber = 0.01
    """Decoupled weight decay; vectors (norms, biases) are exempt."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Parameters with their own learning rate or weight decay; the first matching pattern
    counts."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Global norm that gradients are clipped to; null: off."""
    max_skipped_updates: NotNegative = 3
    """Consecutive updates that may be skipped because of a non-finite gradient."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """Schedule of the learning rate after the warm-up, down to `min_lr_ratio` at
    `run.max_steps`."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: Probability = 0.0
    """The same as a fraction of `run.max_steps`."""
    min_lr_ratio: Probability = 0.0
    """Lowest learning rate of the schedule, as a fraction of `lr`."""
    num_cycles: PositiveNumber = 0.5
    """Number of waves of the schedule cosine; 0.5: it falls once."""
    decay_ratio: Share = 0.2
    """Last fraction of `run.max_steps`, during which warmup_stable_decay falls."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of that fall."""

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
    """Profiles of chosen steps, written to profiler/ in the run folder."""

    steps: tuple[Positive, ...] = ()
    """Steps, counted from 1, of which torch's profiler records a trace."""
    ranks: tuple[NotNegative, ...] = (0,)
    """Ranks that record; empty: all."""
    memory: bool = False
    """Also record GPU memory allocations."""
    nvtx: bool = False
    """Let Nsight Systems capture `steps` instead: `nsys profile --capture-range=cudaProfilerApi
    streamrl learner ...`."""


FlashAttentionVersion: TypeAlias = Literal["auto", 2, 3, 4]


class LearnerSettings(Section):
    """The batch of a step, and how and on what it is trained."""

    groups_per_step: Annotated[int, Field(gt=0, le=MAX_GROUPS)] = 32
    """Groups per batch; each batch makes one policy version."""
    epochs: Positive = 1
    """Passes over each batch."""
    updates_per_batch: Positive = 1
    """Optimizer updates per pass, each on a mini-batch of whole groups."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens per forward and backward pass; a prompt shared by siblings counts once."""
    max_tokens_per_forward_pass: ForwardPassSettings = ForwardPassSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    lora: LoraSettings | None = None
    """LoRA adapter; null: train all parameters."""
    freeze_vision_tower: bool = False
    """Train only the language model of a vision-language model."""
    mesh: MeshSettings = MeshSettings()
    num_ranks: Positive = 1
    """Number of ranks that `streamrl learner` starts on this machine."""
    rank_deadline_s: Seconds = 60.0
    """Seconds that a rank may report nothing before the others end."""
    dtype: Dtype = "float32"
    """Dtype of forward and backward; sums, master weights and optimizer are float32."""
    device: Device = "auto"
    """Device, as in `generator.device`."""
    num_threads: NotNegative = 0
    """CPU threads; 0: torch's choice."""
    profiler: ProfilerSettings = ProfilerSettings()
    peak_tflops: PositiveNumber | None = None
    """Peak throughput of the device in `dtype`, in 10^12 operations/s, for `learner/mfu`."""
    sum_each_micro_batch: bool = True
    """Sum gradients over ranks after every micro-batch; false: once per update, with more
    memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile layers with torch.compile. auto: on a GPU with a compiler, for runs of at least 300
    steps."""
    liger_layers: bool | Literal["auto"] = "auto"
    """Use liger-kernel in layers that are not compiled. auto: on a GPU if it is installed and
    computes the same."""
    flash_attention: FlashAttentionVersion = "auto"
    """FlashAttention version on a GPU. auto: 3 or 4 if it is installed and works there, otherwise
    2."""
    gradient_checkpointing: bool | Positive = False
    """Recompute activations in the backward pass, for less memory; n: those of every n-th layer."""
    check_packing: bool = True
    """At start, compare packed sequences with plain transformers; models that packing changes run
    unpacked."""
    offload: OffloadSettings = OffloadSettings()
    report_entropy: bool = True
    """Measure the policy's entropy at each step."""

    def contradictions(self) -> Iterator[str]:
        if self.offload.activations and not self.gradient_checkpointing:
            yield """learner.offload.activations: moves the inputs of layers that
                gradient_checkpointing keeps, and that is false: set it to true"""

    @property
    def num_updates(self) -> int:
        """Optimizer updates per batch."""
        return self.epochs * self.updates_per_batch

    def require_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError if the sizes of `mesh`, or the batch, do not fit so many ranks."""
        replicate, shard, _, _ = self.mesh.sizes(num_ranks)
        if replicate * shard > self.groups_per_step:
            raise ConfigError(
                f"learner.groups_per_step {self.groups_per_step} is less than the "
                f"{replicate * shard} ranks that each train groups of their own: start fewer, or "
                "raise it"
            )
