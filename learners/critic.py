"""The critic of advantage gae: a value for every response token, and its own optimizer.

Invariant: it starts as a copy of the initial policy's decoder with a value head of zeros, so the
first values are 0; denominators are those of the whole step, like the policy's.
Shapes: R response tokens of a micro-batch or of the step.
"""

from collections.abc import Sequence

import torch

from learners.batch import MicroBatch
from learners.optimizer import learning_rate, make_optimizer, update
from learners.policy import Policy
from streamrl.algorithms.losses import BatchTotals, value_loss
from streamrl.config import RunConfig


class Critic:
    """The value network; `body` is a policy of which only the decoder is used."""

    def __init__(self, config: RunConfig, body: Policy) -> None:
        settings = config.learner.optimizer
        self._config = config.algorithm.value
        self._max_steps = config.run.max_steps
        self._settings = settings.model_copy(update={"lr": self._config.lr or settings.lr})
        self._body = body
        width = body.model.config.get_text_config().hidden_size
        self._head = torch.nn.Linear(width, 1, device=body.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self.optimizer = make_optimizer(self.parameters(), self._settings)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name; the decoder's, and those of `value_head`."""
        lm_head = self._body.model.get_output_embeddings()
        embeddings = self._body.model.get_input_embeddings()
        is_tied = lm_head.weight is embeddings.weight
        skipped = set() if is_tied else set(lm_head.parameters())
        body = {n: p for n, p in self._body.parameters().items() if p not in skipped}
        head = {f"value_head.{name}": p for name, p in self._head.named_parameters()}
        return body | head

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[R] expected return before each response token, float32, with gradient."""
        hidden = self._body.hidden_states(micro_batch)
        return self._head(hidden.to(self._head.weight.dtype))[:, 0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def batch_values(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """[R of the whole batch] on the CPU; `num_tokens` is R."""
        values = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            values[micro_batch.responses] = self.values(micro_batch).cpu()
        return values

    def backward(
        self,
        micro_batch: MicroBatch,
        old_values: torch.Tensor,
        returns: torch.Tensor,
        totals: BatchTotals,
        loss_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Add this micro-batch's gradient; its share of the metrics."""
        output = value_loss(
            self.values(micro_batch),
            old_values,
            returns,
            micro_batch.sequences,
            self._config,
            totals,
            loss_mask,
        )
        (self._config.coef * output.loss).backward()
        return output.metrics

    def update(self, policy_version: int) -> dict[str, float]:
        """One step of its own optimizer, at the policy's learning rate schedule."""
        return update(
            self.optimizer,
            self.parameters().values(),
            learning_rate(policy_version, self._settings, self._max_steps),
            self._settings.max_grad_norm,
            prefix="critic",
        )
