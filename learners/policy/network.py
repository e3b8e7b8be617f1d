"""A transformers model and its heads as one module: everything that is computed for a micro-batch.

Invariant: parameters are used only inside `forward`, so hooks of the module (sharding, compilation)
see every use; hidden states are gathered at response positions before the heads, and logits of the
whole batch never exist. The computation uses the dtype of the modules' parameters;
log-probabilities, entropy and values are at least float32.
Shapes: R response tokens, H hidden size.

transformers scales and soft-caps logits inside each model's `forward`, which the learner does not
call, so those rules are repeated here; packing_check.py detects a family that is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree
from transformers import PreTrainedModel

from learners.batch.micro_batch import MicroBatch, SharedPrompts, rows
from learners.batch.training_batch import TrainingBatch
from learners.parallel.ranks import Ranks
from learners.policy import attention
from learners.policy.decoder import decode, is_attention_only, may_share_prompts, own_attention
from learners.policy.router_replay import RouterRecords
from learners.policy.sequence_parallel import TokenSlice
from streamrl.algorithms.candidates import (
    Candidates,
    Likeliest,
    candidate_logprobs,
    likeliest,
    masked_logprobs,
)
from streamrl.algorithms.kl import full_kl
from streamrl.algorithms.logprobs import LogitTransform, TokenLogprobs, token_logprobs
from streamrl.vision.tower import VisionTower, set_attention


def _scale(config: Any) -> float:
    match config.model_type:
        case "cohere" | "cohere2" | "cohere2_moe" | "cohere_compass_text":
            scale = config.logit_scale
        case "falcon_h1":
            scale = config.lm_head_multiplier
        case "hyperclovax":
            scale = config.logits_scaling
        case "minicpm3":
            scale = 1.0 / config.logits_scaling
        case "inkling_text":
            scale = 1.0 / config.logits_mup_width_multiplier
        case family if family.startswith("granite"):
            scale = 1.0 / (config.logits_scaling or 1.0)
        case _:
            scale = None
    return 1.0 if scale is None else float(scale)


def _softcap(config: Any) -> float | None:
    match config.model_type:
        case "recurrent_gemma":
            softcap = config.logits_soft_cap
        case "xlstm":
            softcap = config.output_logit_soft_cap
        case _:
            softcap = getattr(config, "final_logit_softcapping", None)
    return float(softcap) if softcap else None


@dataclass(frozen=True, eq=False)
class NetworkOutput:
    """Columns [R] of a micro-batch; None if not asked for."""

    hidden: torch.Tensor
    """[R, H] in the compute dtype: the states that predict the response tokens (this rank's slice,
    if ranks share the tokens)."""
    head_weight: torch.Tensor
    """[V, H] of the LM head."""
    head_bias: torch.Tensor | None
    """[V] if it has one."""
    logprobs: torch.Tensor | None = None
    """The log-probability of each response token, in nats."""
    entropy: torch.Tensor | None = None
    """In nats."""
    values: torch.Tensor | None = None
    """Expected return before each response token."""
    kl: torch.Tensor | None = None
    """KL to the reference over the whole vocabulary, in nats."""
    top_logprobs: torch.Tensor | None = None
    """[M] log-probabilities of the micro-batch's `top_candidates`, in nats, without gradient."""
    taught_logprobs: torch.Tensor | None = None
    """[M] log-probabilities of a teacher's candidates, in nats."""
    observed_logprobs: torch.Tensor | None = None
    """[O] log-probabilities of the micro-batch's `observed` tokens, in nats."""
    likeliest: Likeliest | None = None
    """The likeliest tokens [R, K] at the positions of the response tokens, without gradient."""


# Sharding looks in the output for tensors, where the backward pass will begin.
_pytree.register_dataclass(NetworkOutput)


class Network(torch.nn.Module):
    """Decoder, LM head, and a value head where `has_values`.

    `temperature` is the one used in sampling. An attention-only model runs packed, any other
    unpacked, unless `run_packed` changes that. Dropout is off. `tower` is the vision tower of a
    model that sees images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        has_values: bool = False,
        tower: VisionTower | None = None,
    ) -> None:
        super().__init__()
        self.model: PreTrainedModel = model.eval()
        self.device = next(model.parameters()).device
        """The device of the computation; offloaded parameters are elsewhere between passes."""
        self.tower = tower
        self._own_attention = own_attention(model)
        self._may_share_prompts = tower is None and may_share_prompts(model)
        self.run_packed(is_attention_only(model))
        self.value_head: torch.nn.Linear | None = None
        config: Any = model.config.get_text_config()
        if has_values:
            self.value_head = torch.nn.Linear(config.hidden_size, 1, device=self.device)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        self.sequence_block: Ranks | None = None
        """The ranks that share each micro-batch's tokens; None: this rank has them all."""
        self.router_records: RouterRecords | None = None
        """The experts that trajectories recorded; None: the routers choose, and nothing is
        compared."""
        self.temperature = temperature
        self._transform = LogitTransform(temperature, _softcap(config), _scale(config))

    def run_packed(self, packed: bool) -> None:
        """Set whether all trajectories of a micro-batch form one row, or each its own."""
        self.is_packed = packed
        set_attention(self.model, attention.NAME if packed else self._own_attention)

    @property
    def shares_prompts(self) -> bool:
        """Whether a beginning shared by trajectories of a micro-batch is computed once."""
        return self.is_packed and self._may_share_prompts and self.sequence_block is None

    def cut(
        self, batch: TrainingBatch, max_tokens: int, chosen: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Cut the batch, or the chosen trajectories, into micro-batches."""
        return batch.pack(max_tokens, self.device, chosen, shares_prompts=self.shares_prompts)

    def shared_prompts(self, micro_batch: MicroBatch) -> SharedPrompts | None:
        """The tokens of the micro-batch to compute; None for all."""
        return micro_batch.shared_prompts if self.shares_prompts else None

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        trains_entropy: bool = True,
        with_top_logprobs: bool = False,
        with_observed: bool = False,
        taught: Candidates | None = None,
        num_likeliest: int = 0,
        reference: NetworkOutput | None = None,
        with_records: bool = True,
    ) -> NetworkOutput:
        """Compute what is asked for, and values if there is a value head.

        Log-probabilities and entropies are over a token's sampling mask, if it has one.

        Args:
            trains_entropy: the entropy has a gradient.
            taught: a teacher's candidates.
            num_likeliest: K, 0 for none.
            reference: the output of the policy for `kl`.
            with_records: the routers follow the recorded experts, or are compared with them.

        Raises:
            ConfigError: a trajectory has no record of its experts.
        """
        shared = self.shared_prompts(micro_batch)
        records = self.router_records if with_records else None
        experts = None if records is None else records.of(micro_batch)
        tokens = TokenSlice.of(micro_batch, self.sequence_block, shared, experts)
        states = self._states(tokens, micro_batch)
        hidden = rows(states, tokens.predictors)
        observed = tokens.observed(micro_batch.observed, shared) if with_observed else None
        read = None if observed is None else rows(states, observed[0])
        # Computing on the rows is the peak of memory, so free these first.
        del states
        weight, bias = self._head
        columns: dict[str, torch.Tensor | None] = {}
        if with_logprobs:
            top = micro_batch.top_candidates if with_top_logprobs else None
            options = {"with_entropy": with_entropy, "trains_entropy": trains_entropy}
            columns = self._sampled(hidden, tokens, micro_batch, top, taught, **options)
        if read is not None and observed is not None:
            _, targets, first = observed
            # Over the whole vocabulary, since none was sampled.
            found = token_logprobs(read, weight, targets, bias, self._transform).logprobs
            num_observed = len(micro_batch.observed.targets)
            columns["observed_logprobs"] = tokens.gather(found, first, num_observed)
        values = None if self.value_head is None else self._values(hidden, self.value_head)
        return NetworkOutput(
            hidden=hidden,
            head_weight=weight,
            head_bias=bias,
            values=tokens.gather(values),
            kl=tokens.gather(self._kl(hidden, reference)),
            likeliest=self._likeliest(hidden, tokens, num_likeliest) if num_likeliest else None,
            **columns,
        )

    @property
    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the LM head."""
        head: Any = self.model.get_output_embeddings()
        return head.weight, getattr(head, "bias", None)

    def _sampled(
        self,
        hidden: torch.Tensor,
        tokens: TokenSlice,
        micro_batch: MicroBatch,
        top: Candidates | None,
        taught: Candidates | None,
        **options: bool,
    ) -> dict[str, torch.Tensor | None]:
        """Columns for all response tokens of the micro-batch and their candidates."""
        computed = self._logprobs(hidden, tokens, micro_batch, **options)
        logprobs = computed.logprobs
        return {
            "logprobs": tokens.gather(logprobs),
            "entropy": tokens.gather(computed.entropy),
            "top_logprobs": self._candidate_logprobs(top, hidden, tokens, logprobs.detach()),
            "taught_logprobs": self._candidate_logprobs(taught, hidden, tokens, logprobs),
        }

    def _logprobs(
        self, hidden: torch.Tensor, tokens: TokenSlice, micro_batch: MicroBatch, **options: bool
    ) -> TokenLogprobs:
        """Log-probabilities of this rank's response tokens [r]."""
        weight, bias = self._head
        mask = micro_batch.sampling_mask
        if mask is None:
            return token_logprobs(hidden, weight, tokens.targets, bias, self._transform, **options)
        mask = mask.rows(*tokens.rows)
        return masked_logprobs(
            hidden, weight, tokens.targets, mask, bias, self._transform, **options
        )

    def _likeliest(self, hidden: torch.Tensor, tokens: TokenSlice, top_k: int) -> Likeliest:
        """The likeliest tokens [R, K] of the whole micro-batch."""
        weight, bias = self._head
        found = likeliest(hidden, weight, top_k, bias, self._transform)
        first, num_all = tokens.first_row * top_k, tokens.num_rows * top_k

        def of_all(column: torch.Tensor) -> torch.Tensor:
            gathered = tokens.gather(column.flatten(), first, num_all)
            assert gathered is not None, "there is a column"
            return gathered.view(-1, top_k)

        return Likeliest(of_all(found.token_ids), of_all(found.logprobs))

    def _candidate_logprobs(
        self,
        candidates: Candidates | None,
        hidden: torch.Tensor,
        tokens: TokenSlice,
        logprobs: torch.Tensor,
    ) -> torch.Tensor | None:
        """[M] log-probabilities of the whole micro-batch's candidates, with a gradient if the
        tokens' [r] have one; None without candidates."""
        if candidates is None:
            return None
        weight, bias = self._head
        own = candidates.rows(*tokens.rows)
        with torch.set_grad_enabled(logprobs.requires_grad):
            column = candidate_logprobs(
                hidden, weight, tokens.targets, logprobs, own, bias, self._transform
            )
        first = candidates.entries(*tokens.rows).start
        return tokens.gather(column, first, len(candidates.owners))

    def _kl(self, hidden: torch.Tensor, reference: NetworkOutput | None) -> torch.Tensor | None:
        """KL of this rank's response tokens [r] to the reference, over the whole vocabulary."""
        if reference is None:
            return None
        weight, bias = self._head
        theirs = (reference.hidden, reference.head_weight)
        return full_kl(hidden, weight, *theirs, self._transform, bias, reference.head_bias)

    def _values(self, hidden: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
        """[R] values; products in the compute dtype are summed in float32."""
        weight = head.weight.float()
        return torch.nn.functional.linear(hidden.float(), weight, head.bias.float())[:, 0]

    def _states(self, tokens: TokenSlice, micro_batch: MicroBatch) -> torch.Tensor:
        """[n, H] in the compute dtype."""
        return decode(
            self.model,
            tokens,
            packed=self.is_packed,
            has_shards=isinstance(self, FSDPModule),
            tower=self.tower,
            media=micro_batch.media,
        )
