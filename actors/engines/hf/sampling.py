"""Samples one token per row from logits, with its log-probability in the distribution sampled from.

Shapes: n rows, V vocabulary. Rows may differ in every parameter. Sampling inverts the cumulative
distribution at one uniform number per row: a seeded row takes one number of its own generator, and
a token of probability 0 is never sampled.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Sampled(NamedTuple):
    """One token of each of n rows."""

    token_ids: torch.Tensor
    """[n] int64"""
    logprobs: torch.Tensor
    """[n] float32 (nats)"""
    kept: torch.Tensor | None
    """[M, 2] row and id of each token left by truncation, in row order, if any row asks for
    them."""
    top: tuple[torch.Tensor, torch.Tensor] | None
    """Log-probabilities and ids [n, k] of the likeliest tokens, if any row asks for them."""


def sample(
    logits: torch.Tensor,
    columns: NDArray[np.void],
    generator: torch.Generator,
    seeded: Iterable[tuple[int, torch.Generator]] = (),
    *,
    keeps_mask: bool = False,
    num_top: int = 0,
) -> Sampled:
    """One token of each row, for logits [n, V]; greedy rows take the likeliest token and report its
    log-probability at temperature 1.

    Args:
        columns: temperature, top_k and top_p [n].
        seeded: rows with a generator of their own.
        keeps_mask, num_top: what a row asks for, see `Sampled`.
    """

    def column(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device)[:, None]

    temperature, top_k, top_p = (columns[name] for name in ("temperature", "top_k", "top_p"))
    is_greedy = temperature == 0
    scaled = logits.float() / column(np.where(is_greedy, np.float32(1), temperature))
    has_top_k, has_top_p = (top_k > 0).any(), (top_p < 1).any()
    if has_top_k or has_top_p:
        scaled = truncate(
            scaled, column(top_k) if has_top_k else None, column(top_p) if has_top_p else None
        )
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(
        len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator
    )
    for row, own in seeded:
        uniform[row] = torch.rand(1, dtype=torch.float64, generator=own)
    token_ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    token_ids = token_ids.clamp_max(logits.shape[-1] - 1)
    if is_greedy.any():
        greedy = column(is_greedy)
        token_ids = torch.where(greedy, logits.argmax(-1, keepdim=True), token_ids)
        logprobs = torch.where(greedy, torch.log_softmax(logits.float(), dim=-1), logprobs)
    top = None
    if num_top:
        values, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
        top = values, top_ids
    return Sampled(
        token_ids[:, 0],
        logprobs.gather(-1, token_ids)[:, 0],
        scaled.isfinite().nonzero() if keeps_mask else None,
        top,
    )


def truncate(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Logits [n, V] with -inf outside the k likeliest, then outside the nucleus of mass p.

    `top_k` and `top_p` are [n, 1]; 0 and 1 truncate nothing. The likeliest token always stays
    (Holtzman et al. 2020, arXiv 1904.09751, for the nucleus).
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        outside |= (rank >= top_k) & (top_k > 0)
    if top_p is not None:
        probabilities = ordered.masked_fill(outside, -torch.inf).softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        outside |= (mass_before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return logits.masked_fill(torch.empty_like(outside).scatter_(-1, order, outside), -torch.inf)
