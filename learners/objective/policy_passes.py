"""The policy's forward passes in a step: those with gradient, and what is asked of them before.

Invariant: a micro-batch has the same numbers in every pass, and at most one graph exists. Where the
log-probabilities are needed before the loss (ratios in the advantage, KL in the reward, corrections
of a whole batch), the pass over the first micro-batch comes last and keeps its graph, which the
gradient then begins with: what fits into one micro-batch is computed once. A sharded network keeps
none, since its parameters stay gathered until the backward pass; nor does one with dropout, which
acts in passes with gradient alone.
Shapes: R response tokens.
"""

from collections.abc import Sequence

import torch

from learners.micro_batch import MicroBatch
from learners.parallel.sharding import has_shards
from learners.policy.network import NetworkOutput
from learners.policy.policy import Policy
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


class PolicyPasses:
    """`FactCollector` asks for log-probabilities, `Gradient` for what the loss needs."""

    def __init__(self, config: RunConfig, policy: Policy, reference: Policy | None) -> None:
        algorithm = config.algorithm
        self._policy = policy
        self._exact_reference = reference if algorithm.kl_loss.is_exact else None
        self._with_entropy = algorithm.entropy_coef > 0 or config.learner.report_entropy
        self._trains_entropy = algorithm.entropy_coef != 0
        self._num_top = config.num_top_logprobs
        lora = config.learner.lora
        self._has_dropout = lora is not None and lora.dropout > 0
        self._kept: tuple[MicroBatch, NetworkOutput] | None = None

    def logprobs(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """[R of the whole batch] in nats, on the CPU; `num_tokens` is R. The gradient of the same
        micro-batches comes next."""
        self._kept = None
        if self._has_dropout or has_shards(self._policy.network):
            return self._policy.batch_logprobs(micro_batches, num_tokens)
        first, *others = micro_batches
        logprobs = self._policy.batch_logprobs(others, num_tokens)
        output = self._with_gradient(first)
        assert output.logprobs is not None, "they are asked for by default"
        logprobs[first.responses] = output.logprobs.detach().float().cpu()
        self._kept = (first, output)
        return logprobs

    def training(self, micro_batch: MicroBatch) -> NetworkOutput:
        """The pass that the loss is computed from.

        Raises:
            ConfigError: a generator did not record the likeliest tokens.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is micro_batch:
            return kept[1]
        del kept
        return self._with_gradient(micro_batch)

    def _with_gradient(self, micro_batch: MicroBatch) -> NetworkOutput:
        return self._policy(
            micro_batch,
            with_entropy=self._with_entropy,
            trains_entropy=self._trains_entropy,
            with_top_logprobs=self._needs_top_logprobs(micro_batch),
            reference=self._exact(micro_batch),
        )

    def _needs_top_logprobs(self, micro_batch: MicroBatch) -> bool:
        if not self._num_top or micro_batch.is_empty:
            return False
        if micro_batch.top_candidates is None:
            raise ConfigError(
                f"algorithm.loss_config.divergence_topk: was {self._num_top}, and groups came "
                "without the log-probabilities of the likeliest tokens: start every daemon of a "
                "run with one configuration"
            )
        return True

    def _exact(self, micro_batch: MicroBatch) -> NetworkOutput | None:
        """Of the reference, where the KL to it is taken over the whole vocabulary."""
        if self._exact_reference is None:
            return None
        with torch.no_grad():
            return self._exact_reference(micro_batch, with_logprobs=False)
