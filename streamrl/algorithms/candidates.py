"""Candidates: for each response token a set of token ids, and their probabilities under a policy.

A set of any size is a sampling mask: the ids that top-k and top-p left of the vocabulary when the
token was sampled ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). A policy's
probabilities over it are the softmax over these ids alone. Sets of equal size are the `Likeliest`.

Invariant: logits are computed for the candidates alone, and for the whole vocabulary only in rows
without candidates, so a mask costs what its ids cost.

Letters: R response tokens, M candidates in all, K likeliest per token, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from streamrl.algorithms.logprobs import (
    PLAIN_LOGITS,
    LogitTransform,
    TokenLogprobs,
    logit_blocks,
    token_logprobs,
)

_CHUNK_ELEMENTS = 1 << 23
"""Elements of the [m, H] products that exist at a time."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of R response tokens; a token may have none."""

    owners: Tensor
    """[M] int64, ascending: the response token (row) of each candidate."""
    token_ids: Tensor
    """[M] int64"""
    num_rows: int
    """R"""
    behavior_logprobs: Tensor | None = None
    """[M] nats, if they were recorded."""
    has_all_rows: bool = False
    """Whether the host knows that each row has some."""

    @property
    def counts(self) -> Tensor:
        """[R]"""
        return self.sum(torch.ones_like(self.owners))

    def sum(self, values: Tensor) -> Tensor:
        """[M] -> [R] sum over the candidates of each row."""
        return values.new_zeros(self.num_rows).index_add(0, self.owners, values)

    def rows(self, first: int, last: int) -> "Candidates":
        """The candidates of the rows [first, last)."""
        chosen = self.entries(first, last)
        own = self._each(lambda column: column[chosen])
        return replace(own, owners=own.owners - first, num_rows=last - first)

    def entries(self, first: int, last: int) -> slice:
        """The slice of M that belongs to the rows [first, last); waits for a GPU unless these are
        all rows."""
        if (first, last) == (0, self.num_rows):
            return slice(0, len(self.owners))
        bounds = torch.tensor([first, last], device=self.owners.device)
        return slice(*torch.searchsorted(self.owners, bounds).tolist())

    def select(self, is_kept: Tensor) -> "Candidates":
        """The candidates of the rows where `is_kept` [R] is true; these rows are numbered anew."""
        places = is_kept.cumsum(0) - 1
        chosen = is_kept[self.owners]
        kept = self._each(lambda column: column[chosen])
        return replace(kept, owners=places[kept.owners], num_rows=int(is_kept.sum()))

    def without(self, targets: Tensor) -> "Candidates":
        """All candidates except the row's own target; targets: [R]."""
        chosen = self.token_ids != targets[self.owners]
        return replace(self._each(lambda column: column[chosen]), has_all_rows=False)

    def to(self, device: torch.device) -> "Candidates":
        return self._each(lambda column: column.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Candidates":
        """With each column [M] changed."""
        logprobs = self.behavior_logprobs
        return replace(
            self,
            owners=change(self.owners),
            token_ids=change(self.token_ids),
            behavior_logprobs=None if logprobs is None else change(logprobs),
        )


def masked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Candidates,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
    with_entropy: bool = False,
    trains_entropy: bool = True,
) -> TokenLogprobs:
    """`token_logprobs` over each token's candidates, or over the vocabulary if it has none.

    Raises:
        ValueError: a target is not among its candidates.
    """
    is_masked = None if mask.has_all_rows else mask.counts > 0
    if is_masked is None or is_masked.all():
        logits = _logits(hidden, weight, bias, mask, transform)
        logprobs, entropy = _over_candidates(logits, targets, mask)
        entropy = entropy if trains_entropy else entropy.detach()
        return TokenLogprobs(logprobs, entropy if with_entropy else None)
    options = {"with_entropy": with_entropy, "trains_entropy": trains_entropy}
    whole = token_logprobs(
        hidden[~is_masked], weight, targets[~is_masked], bias, transform, **options
    )
    if not is_masked.any():
        return whole
    own = replace(mask.select(is_masked), has_all_rows=True)
    masked = masked_logprobs(
        hidden[is_masked], weight, targets[is_masked], own, bias, transform, **options
    )
    logprobs = _merged(is_masked, masked.logprobs, whole.logprobs)
    if masked.entropy is None or whole.entropy is None:
        return TokenLogprobs(logprobs, None)
    return TokenLogprobs(logprobs, _merged(is_masked, masked.entropy, whole.entropy))


def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    candidates: Candidates,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
) -> Tensor:
    """[M] log-probabilities of the candidates over the whole vocabulary, in nats.

    Args:
        logprobs: [R] those of the targets, which have the same normalizer as the candidates.
    """
    rows = torch.arange(len(targets), device=targets.device)
    chosen = _logits(hidden, weight, bias, Candidates(rows, targets, len(rows)), transform)
    logits = _logits(hidden, weight, bias, candidates, transform)
    return logits + (logprobs - chosen)[candidates.owners]


@dataclass(frozen=True, eq=False)
class Likeliest:
    """A policy's K likeliest tokens at each of R positions, without gradient."""

    token_ids: Tensor
    """[R, K] int64"""
    logprobs: Tensor
    """[R, K] nats, over the whole vocabulary; -inf where there is no candidate."""

    @classmethod
    def none(cls, num_rows: int, top_k: int) -> "Likeliest":
        """R positions that have no candidates yet."""
        ids = torch.zeros(num_rows, top_k, dtype=torch.int64)
        return cls(ids, torch.full(ids.shape, -torch.inf))

    def __getitem__(self, rows: Tensor) -> "Likeliest":
        return Likeliest(self.token_ids[rows], self.logprobs[rows])

    def to(self, device: torch.device) -> "Likeliest":
        return Likeliest(self.token_ids.to(device), self.logprobs.to(device))

    def within(self, num_tokens: int) -> "Likeliest":
        """Remove ids beyond this vocabulary of `num_tokens`: padding rows of a larger LM head."""
        is_inside = self.token_ids < num_tokens
        if is_inside.all():
            return self
        ids = self.token_ids.where(is_inside, 0)
        return Likeliest(ids, self.logprobs.masked_fill(~is_inside, -torch.inf))

    def candidates(self) -> Candidates:
        """All R K of them, as `Candidates`."""
        num_rows, top_k = self.token_ids.shape
        owners = torch.arange(num_rows, device=self.token_ids.device).repeat_interleave(top_k)
        return Candidates(owners, self.token_ids.flatten(), num_rows)


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
) -> Likeliest:
    """The `top_k` likeliest tokens for each row of hidden [R, H], by blocks of the vocabulary."""
    none = Likeliest.none(len(hidden), top_k)
    ids, best = none.token_ids.to(hidden.device), none.logprobs.to(hidden.device)
    normalizer = best.new_full((len(hidden),), -torch.inf)
    for block, logits in logit_blocks(hidden, weight, bias, transform):
        normalizer = torch.logaddexp(normalizer, logits.logsumexp(1))
        top = logits.topk(min(top_k, logits.shape[1]))
        best, places = torch.cat([best, top.values], 1).topk(top_k)
        ids = torch.cat([ids, top.indices + block.start], 1).gather(1, places)
    return Likeliest(ids, best - normalizer[:, None])


def _over_candidates(logits: Tensor, targets: Tensor, own: Candidates) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy [R], from the logits [M] of its candidates."""
    is_target = own.token_ids == targets[own.owners]
    if not is_target.is_cuda and int(is_target.sum()) != len(targets):
        raise ValueError("mask: a target must be among its candidates once")
    highest = logits.new_full((len(targets),), -torch.inf)
    highest = highest.scatter_reduce(0, own.owners, logits.detach(), "amax")
    shifted = logits - highest[own.owners]
    weights = shifted.exp()
    total = own.sum(weights)
    normalizer = total.log()
    chosen = own.sum(torch.where(is_target, shifted, 0.0))
    return chosen - normalizer, normalizer - own.sum(weights * shifted) / total


def _merged(is_masked: Tensor, masked: Tensor, whole: Tensor) -> Tensor:
    column = masked.new_zeros(len(is_masked))
    column = column.masked_scatter(is_masked, masked)
    return column.masked_scatter(~is_masked, whole.to(masked.dtype))


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidates: Candidates,
    transform: LogitTransform,
) -> Tensor:
    """[M] transformed logits of the candidates, at least float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        products: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
            hidden, weight, candidates.owners, candidates.token_ids
        )
    return transform(products if bias is None else products + bias[candidates.token_ids])


class _Products(torch.autograd.Function):
    """[M] hidden[owners] . weight[token_ids], summed in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, owners: Tensor, token_ids: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, owners, token_ids)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        products = torch.empty(len(owners), dtype=wide, device=hidden.device)
        size = max(1, _CHUNK_ELEMENTS // hidden.shape[1])
        for start in range(0, len(owners), size):
            part = slice(start, start + size)
            left, right = hidden[owners[part]], weight[token_ids[part]]
            products[part] = (left.to(wide) * right.to(wide)).sum(1)
        return products

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, owners, token_ids = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = torch.arange(len(hidden), device=owners.device)
            starts = torch.searchsorted(owners, rows)
            grad_hidden = _weighted_sums(weight.to(hidden.dtype), token_ids, starts, gradient)
        if ctx.needs_input_grad[1]:
            rising, order = token_ids.sort(stable=True)
            starts = torch.searchsorted(rising, torch.arange(len(weight), device=rising.device))
            sums = _weighted_sums(hidden, owners[order], starts, gradient[order])
            grad_weight = sums.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _weighted_sums(table: Tensor, indices: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """For each run of indices that begins at one of `starts`, the weighted sum of the table's
    rows."""
    if not len(indices):
        return table.new_zeros(len(starts), table.shape[1])
    return embedding_bag(
        indices, table, starts, mode="sum", per_sample_weights=weights.to(table.dtype)
    )
