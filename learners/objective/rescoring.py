"""Rescoring: log-probabilities of tokens under the learner's weights of the version that sampled
them.

They tell engine mismatch from policy lag (`split` of `streamrl.algorithms.rollout_is.rejection`),
at the cost of a pass without gradient for each version that sampled tokens of the chosen groups,
and of a copy of the trained weights, in the memory of the host, for each version that a group may
be behind. A token is not scored if its group was not chosen, or if the weights of its version are
gone: it is older than `buffer.max_staleness`, or older or newer than the checkpoint that this
process began from.

Invariant: which groups are chosen depends on their places in the prompt stream alone, and a token's
number neither on how the batch is cut nor on how it is divided among ranks, which call all of this
together. Between the calls the policy has its newest weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from learners.batch.training_batch import TrainingBatch
from learners.parallel.ranks import Ranks
from learners.policy.policy import Policy
from streamrl.config import RunConfig

_GOLDEN_RATIO = 0.6180339887498949


def is_chosen(prompt_index: int, share: float) -> bool:
    """Whether the group is among the share that is scored: multiples of the golden ratio are spread
    evenly, whatever period the prompt stream has (Weyl's equidistribution theorem)."""
    return prompt_index * _GOLDEN_RATIO % 1.0 < share


class Rescorer:
    """`keep` comes before the first update of a version, so that later versions can score it."""

    def __init__(self, config: RunConfig, policy: Policy, ranks: Ranks) -> None:
        limit = config.learner.max_tokens_per_forward_pass.proximal
        self._max_tokens = limit or config.learner.max_tokens_per_micro_batch
        self._share = config.algorithm.rescore_share
        self._num_kept = config.buffer.largest_staleness
        self._policy = policy
        self._ranks = ranks
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}

    def keep(self, policy_version: int) -> None:
        """Copy the weights, which are of this version, and forget those that are too old."""
        oldest = policy_version + 1 - self._num_kept
        self._kept = {v: copy for v, copy in self._kept.items() if oldest <= v < policy_version}
        if self._num_kept:
            self._kept[policy_version] = self._copy()

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[R] in nats, on the CPU; NaN where they are not known."""
        indices = enumerate(batch.prompt_indices)
        chosen = [i for i, prompt_index in indices if is_chosen(prompt_index, self._share)]
        versions, num_tokens = batch.policy_versions, batch.sequences.num_tokens
        rescored = torch.full((num_tokens,), torch.nan)
        for version in versions[batch.rows(chosen)].unique().tolist():
            is_current = version == batch.policy_version
            if not is_current and version not in self._kept:
                continue
            is_own = versions == version
            has_own = batch.sequences.max(is_own.float()) > 0
            members = [i for i in chosen if has_own[i]]
            micro_batches = self._policy.network.cut(batch, self._max_tokens, members)
            with self._weights(None if is_current else version):
                found = self._policy.batch_logprobs(micro_batches, num_tokens)
            found = self._ranks.sum(found)
            rows = batch.rows(members)
            rows = rows[is_own[rows]]
            rescored[rows] = found[rows]
        return rescored

    @contextmanager
    def _weights(self, version: int | None) -> Iterator[None]:
        """The policy with the weights of an earlier version; as it is for None."""
        if version is None:
            yield
            return
        newest = self._copy()
        try:
            self._load(self._kept[version])
            yield
        finally:
            self._load(newest)

    def _copy(self) -> Mapping[str, torch.Tensor]:
        """What this rank has of each trained parameter."""
        parameters = self._policy.parameters().items()
        return {name: _local(p).to("cpu", copy=True) for name, p in parameters}

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._policy.parameters().items():
            _local(parameter).copy_(weights[name])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The shard of this rank; it shares the parameter's memory."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
