"""The critic of advantage gae: a value for every response token, and its own optimizer.

Invariant: it starts from the decoder of the initial policy, or of its own model with the same
tokens, and a value head of zeros, so the first values are 0; denominators are those of the whole
step, like the policy's.
Shapes: R response tokens of a micro-batch or of the step.
"""

from collections.abc import Sequence

import torch

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.optimizer import keep_state_on_host, learning_rate, make_optimizer, update
from learners.parallel.mesh import Mesh
from learners.policy.loading import load_network, require_same_input, within_vocabulary
from learners.policy.network import Network
from learners.policy.sharding import end_passes, master_of
from streamrl.algorithms.losses import BatchTotals, value_loss
from streamrl.config import RunConfig


class Critic:
    """The value network: its LM head is not used."""

    def __init__(self, config: RunConfig, network: Network) -> None:
        self._config = config.algorithm.value
        self._aggregation = config.loss_config
        self._max_steps = config.run.max_steps
        self._settings = config.critic_optimizer
        self._policy_max_tokens = config.learner.max_tokens_per_micro_batch
        self._max_tokens = self._config.max_tokens_per_micro_batch or self._policy_max_tokens
        self.network = network
        self.optimizer = make_optimizer(self.parameters(), self._settings)
        if config.learner.offload.optimizer:
            keep_state_on_host(self.optimizer)

    @classmethod
    def from_config(cls, config: RunConfig, mesh: Mesh | None = None) -> "Critic":
        """The critic with the decoder of `algorithm.value.model_path`, or of `model.path`.

        Raises:
            ConfigError: there is no model, or it does not read the policy's tokens and images.
        """
        own, setting = config.algorithm.value.model_path, "model.path"
        if own is not None:
            setting = "algorithm.value.model_path"
            require_same_input(config, setting, own)
        return cls(config, load_network(config, own, has_values=True, mesh=mesh, setting=setting))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by name: the decoder's and those of `value_head`."""
        model = self.network.model
        lm_head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        is_tied = lm_head.weight is embeddings.weight
        skipped = set() if is_tied else set(lm_head.parameters())
        assert self.network.value_head is not None, "a critic's network has one"
        head = self.network.value_head.named_parameters(prefix="value_head")
        named = {n: p for n, p in model.named_parameters() if p not in skipped} | dict(head)
        return {name: master_of(p) for name, p in named.items()}

    def micro_batches(
        self,
        batch: TrainingBatch,
        of_policy: Sequence[MicroBatch],
        chosen: Sequence[int] | None = None,
        *,
        limit: int | None = None,
    ) -> Sequence[MicroBatch]:
        """Micro-batches of the batch, or of the chosen trajectories: the policy's, unless the
        critic has its own model or token limit."""
        limit = limit or self._max_tokens
        if limit == self._policy_max_tokens and not self._config.model_path:
            return of_policy
        return self.network.cut(within_vocabulary(self.network, batch), limit, chosen)

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[R] expected return before each response token, float32, with gradient."""
        values: torch.Tensor = self.network(micro_batch, with_logprobs=False).values
        return values

    @torch.no_grad()
    def batch_values(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """Values [R of the whole batch] on the CPU; `num_tokens` is R."""
        values = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            values[micro_batch.responses] = self.values(micro_batch).cpu()
        end_passes(self.network)
        return values

    def backward(
        self,
        micro_batch: MicroBatch,
        old_values: torch.Tensor,
        returns: torch.Tensor,
        totals: BatchTotals,
        loss_mask: torch.Tensor | None = None,
        *,
        loss_scale: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        """Add this micro-batch's gradient, times the loss scale; returns its share of the
        metrics."""
        output = value_loss(
            self.values(micro_batch),
            old_values,
            returns,
            micro_batch.sequences,
            self._config,
            totals,
            loss_mask,
            self._aggregation,
        )
        (self._config.coef * loss_scale * output.loss).backward()
        return output.metrics

    def update(
        self, policy_version: int, *, is_frozen: bool = False, loss_scale: float = 1.0
    ) -> dict[str, float]:
        """One step of its own optimizer, at the policy's learning rate schedule."""
        return update(
            self.optimizer,
            self.parameters().values(),
            learning_rate(policy_version, self._settings, self._max_steps),
            self._settings.max_grad_norm,
            prefix="critic",
            is_frozen=is_frozen,
            loss_scale=loss_scale,
        )
