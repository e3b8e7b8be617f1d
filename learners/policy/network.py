"""A transformers model and its heads as one module: what is computed of a micro-batch's tokens.

Invariant: every use of a parameter is inside `forward`, so whoever hooks the module (sharding,
compilation) sees it; hidden states are gathered at response positions before the heads, and logits
of the whole batch never exist. Log-probabilities, entropy and values are float32 at least.
Shapes: R response tokens, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree
from transformers import PreTrainedModel

from learners.batch import MicroBatch
from learners.policy import attention
from streamrl.algorithms.kl import full_kl
from streamrl.algorithms.logprobs import LogitTransform, token_logprobs


@dataclass(frozen=True, eq=False)
class NetworkOutput:
    """Columns [R] of a micro-batch; None where they were not asked for."""

    hidden: torch.Tensor
    """[R, H] in the compute dtype: the states that predict the response tokens."""
    head_weight: torch.Tensor
    """[V, H] of the LM head."""
    logprobs: torch.Tensor | None = None
    """Of each response token, in nats."""
    entropy: torch.Tensor | None = None
    """In nats."""
    values: torch.Tensor | None = None
    """Expected return before each response token."""
    kl: torch.Tensor | None = None
    """To the reference, over the whole vocabulary, in nats."""


# Sharding looks for the tensors of an output, where the backward pass will begin.
_pytree.register_dataclass(NetworkOutput)


class Network(torch.nn.Module):
    """Decoder, LM head, and a value head where `has_values`.

    `temperature` is the one that the behavior policy sampled with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        dtype: torch.dtype,
        has_values: bool = False,
    ) -> None:
        super().__init__()
        model.set_attn_implementation(attention.NAME)
        self.model = model
        self.value_head: torch.nn.Linear | None = None
        config: Any = model.config.get_text_config()
        if has_values:
            device = next(model.parameters()).device
            self.value_head = torch.nn.Linear(config.hidden_size, 1, device=device)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        self._dtype = dtype
        softcap = getattr(config, "final_logit_softcapping", None)
        self._transform = LogitTransform(temperature=temperature, softcap=softcap)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        reference: NetworkOutput | None = None,
    ) -> NetworkOutput:
        """What is asked for, and the values if there is a value head.

        Args:
            reference: the output of the policy that `kl` is taken to.
        """
        hidden = self._hidden_states(micro_batch)
        head: Any = self.model.get_output_embeddings()
        logprobs = entropy = values = kl = None
        if with_logprobs:
            computed = token_logprobs(
                hidden,
                head.weight,
                micro_batch.targets,
                bias=getattr(head, "bias", None),
                transform=self._transform,
                with_entropy=with_entropy,
            )
            logprobs, entropy = computed.logprobs, computed.entropy
        if self.value_head is not None:
            values = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0].float()
        if reference is not None:
            theirs = (reference.hidden, reference.head_weight)
            kl = full_kl(hidden, head.weight, *theirs, self._transform)
        return NetworkOutput(hidden, head.weight, logprobs, entropy, values, kl)

    def _hidden_states(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[R, H] in the model's compute dtype."""
        packing = micro_batch.packing
        decoder: Any = self.model.get_decoder()
        casts = self._dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=casts):
            output = decoder(
                input_ids=micro_batch.token_ids,
                position_ids=packing.positions[None],
                use_cache=False,
                packing=packing,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden[micro_batch.predictors]
