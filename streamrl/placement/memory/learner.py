"""What a rank of the learner needs on its device, as the learner allocates it.

    weights, gradients, AdamW   4 + 4 + 8 bytes a trained parameter, divided by the ranks that
                                shard (ZeRO, arXiv 1910.02054, section 3.1; here all is float32)
    gathered layers             two at a time and the embeddings, in `learner.dtype`
    activations                 what a layer keeps for the backward pass, operation by operation as
                                in arXiv 2205.05198, section 4.1, for RMS norms, a gated MLP, and
                                attention that keeps no scores

Certain is what shapes and settings fix; activations, blocks of logits and the driver's own memory
are rough. Invariant: pure. Called by fit.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streamrl.config import RunConfig
from streamrl.config.learner.lora import LoraSettings
from streamrl.placement.memory.need import Need, Part
from streamrl.placement.memory.shape import ModelShape

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_FLOAT32, _MOMENTS = 4, 8
_SEND_BUFFERS = 2
_LOGIT_BLOCK_BYTES = 3 * 4 * 2**26
"""Of token_logprobs on a GPU: 2^26 logits in float32, and as much for two intermediate results."""
DRIVER_BYTES = 2**30
"""Roughly what CUDA, cuBLAS and NCCL take in one process."""


@dataclass(frozen=True)
class LearnerMemory:
    """Of one rank among `num_ranks`; the first one (`sends`) has the buffers of the weights."""

    config: RunConfig
    shape: ModelShape
    num_ranks: int
    sends: bool = True

    def need(self) -> Need:
        """At the peak of a step; loading takes less."""
        return Need.of((*self._held(), *self._step(), self._driver), self._remedies())

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient."""
        lora = self.config.learner.lora
        return self.shape.num_parameters if lora is None else adapter_size(self.shape, lora)

    @property
    def num_roles(self) -> int:
        """Whole models: the policy, and a reference and a critic where there are some."""
        algorithm = self.config.algorithm
        has_reference = algorithm.needs_reference and self.config.learner.lora is None
        return 1 + has_reference + algorithm.needs_values

    @property
    def _num_shards(self) -> int:
        _, shard, sequence, tensor = self.config.learner.mesh.sizes(self.num_ranks)
        return shard * sequence * tensor

    @property
    def _is_sharded(self) -> bool:
        offload = self.config.learner.offload
        return self.num_ranks > 1 or offload.parameters or offload.reference

    @property
    def _compute_bytes(self) -> int:
        return _SIZES[self.config.learner.dtype]

    @property
    def _driver(self) -> Part:
        return Part("CUDA and libraries", DRIVER_BYTES, is_certain=False)

    def _held(self) -> Iterator[Part]:
        """Between the steps."""
        learner, algorithm, total = self.config.learner, self.config.algorithm, self._total
        if not learner.offload.parameters:
            yield Part("weights", self._shard(_FLOAT32 * total))
            yield Part("gradients", self._shard(_FLOAT32 * self.num_trained))
            if algorithm.needs_values:
                yield Part("critic", self._shard((2 * _FLOAT32 + _MOMENTS) * total))
            if self.num_roles > 1 + algorithm.needs_values and not learner.offload.reference:
                reference = _FLOAT32 if self._is_sharded else self._compute_bytes
                yield Part("reference", self._shard(reference * total))
            if not learner.offload.optimizer:
                yield Part("optimizer", self._shard(_MOMENTS * self.num_trained))
            if not self._is_sharded and self._compute_bytes < _FLOAT32:
                copies = 1 + algorithm.needs_values
                yield Part(f"copies in {learner.dtype}", copies * self._compute_bytes * total)
        if self._is_sharded and not learner.sum_each_micro_batch:
            yield Part("unsummed gradients", _FLOAT32 * self.num_trained)
        if self.sends:
            yield Part("weights to send", _SEND_BUFFERS * self._sent_bytes)

    def _step(self) -> tuple[Part, ...]:
        """Of a pass, or of the update where its moments come from the host then."""
        passing = tuple(self._pass())
        offload = self.config.learner.offload
        moments = self._shard(_MOMENTS * self.num_trained) if offload.optimizer else 0
        if moments > sum(part.num_bytes for part in passing):
            return (Part("optimizer, for the update", moments),)
        return passing

    def _pass(self) -> Iterator[Part]:
        shape, learner = self.shape, self.config.learner
        size, tensor = self._compute_bytes, learner.mesh.tensor
        if self._is_sharded:
            layers = 2 * shape.num_in_layer // tensor
            yield Part("gathered layers", size * (layers + shape.num_embeddings))
        tokens = -(-learner.max_tokens_per_micro_batch // learner.mesh.sequence)
        layer = activation_bytes(shape, size, tensor) * tokens
        if learner.gradient_checkpointing:
            inputs = 0 if learner.offload.activations else shape.num_layers * shape.hidden_size
            yield Part("activations", layer + inputs * size * tokens, is_certain=False)
        else:
            yield Part("activations", layer * shape.num_layers, is_certain=False)
        logits = min(_LOGIT_BLOCK_BYTES, 3 * _FLOAT32 * tokens * shape.vocab_size)
        yield Part("logits", logits, is_certain=False)

    @property
    def _total(self) -> int:
        return self.shape.num_parameters

    def _shard(self, num_bytes: int) -> int:
        return -(-num_bytes // self._num_shards)

    @property
    def _sent_bytes(self) -> int:
        lora, dtype = self.config.learner.lora, self.config.weights.dtype
        is_adapter = lora is not None and lora.publish == "adapter"
        num_sent = self.num_trained if is_adapter else self._total
        return num_sent * _SIZES[dtype or "float32"]

    def _remedies(self) -> Iterator[str]:
        learner = self.config.learner
        yield "more learner.num_ranks"
        if self.sends and self.config.weights.dtype in (None, "float32"):
            yield "weights.dtype bfloat16"
        if learner.lora is None:
            yield "learner.lora"
        if not learner.offload.parameters:
            yield "learner.offload.parameters"
        if not learner.gradient_checkpointing:
            yield "learner.gradient_checkpointing"
        yield "a smaller learner.max_tokens_per_micro_batch"


def activation_bytes(shape: ModelShape, dtype_bytes: int, tensor: int = 1) -> int:
    """Of one token in one decoder layer, with `tensor` ranks that share its matrices.

    Two norms keep their input and its normalized form in float32, and their result; queries, keys,
    values and the output of attention; four times the width of the MLP.
    """
    norms = 2 * shape.hidden_size * (2 * _FLOAT32 + dtype_bytes)
    attention = 2 * shape.query_width + 2 * shape.key_value_width
    return norms + (attention + 4 * shape.intermediate_size) * dtype_bytes // tensor


def adapter_size(shape: ModelShape, lora: LoraSettings) -> int:
    """Parameters of the two factors of each matrix that gets some."""
    h, q, kv, i = (
        shape.hidden_size,
        shape.query_width,
        shape.key_value_width,
        shape.intermediate_size,
    )
    widths = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
    widths |= {"gate_proj": h + i, "up_proj": h + i, "down_proj": i + h}
    chosen = widths if lora.targets == "all-linear" else lora.targets
    return lora.rank * shape.num_layers * sum(widths.get(name, h + h) for name in chosen)
