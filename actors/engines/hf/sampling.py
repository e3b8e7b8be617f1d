"""One token per row, from logits; the log-probability is that of the distribution sampled from.

Shapes: n rows, V vocabulary. Rows may differ in every parameter. Sampling inverts the cumulative
distribution at one uniform number per row: a seeded row takes one number of its own generator, and
a token of probability 0 is never sampled.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of n rows as columns [n, 1]; a column that no row needs is None."""

    temperature: torch.Tensor
    is_greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    generators: tuple[tuple[int, torch.Generator], ...]

    @classmethod
    def of(
        cls,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        generators: tuple[tuple[int, torch.Generator], ...],
        device: torch.device,
    ) -> "RowSampling":
        """The columns [n] as tensors; `generators` pairs a seeded row with its own generator."""

        def column(values: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)[:, None]

        is_greedy = temperature == 0
        return cls(
            temperature=column(np.where(is_greedy, np.float32(1), temperature)),
            is_greedy=column(is_greedy) if is_greedy.any() else None,
            top_k=column(top_k) if (top_k > 0).any() else None,
            top_p=column(top_p) if (top_p < 1).any() else None,
            generators=generators,
        )


def sample(
    logits: torch.Tensor, sampling: RowSampling, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [n] int64 and their log-probabilities [n] float32 (nats), for logits [n, V].

    Greedy rows take the likeliest token and report its log-probability at temperature 1.
    """
    scaled = logits.float() / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled = truncate(scaled, sampling.top_k, sampling.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(
        len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator
    )
    for row, own in sampling.generators:
        uniform[row] = torch.rand(1, dtype=torch.float64, generator=own)
    token_ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    token_ids = token_ids.clamp_max(logits.shape[-1] - 1)
    if sampling.is_greedy is not None:
        greedy = sampling.is_greedy
        token_ids = torch.where(greedy, logits.argmax(-1, keepdim=True), token_ids)
        logprobs = torch.where(greedy, torch.log_softmax(logits.float(), dim=-1), logprobs)
    return token_ids[:, 0], logprobs.gather(-1, token_ids)[:, 0]


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
