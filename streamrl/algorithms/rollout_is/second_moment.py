"""The second moment of log-ratios, kept small by masking the largest of them: M2PO.

A token is harmful if its update moves the policy further from the behavior policy: A > 0 and
d > 0, or A < 0 and d < 0, with d = log(train / behavior). Of the harmful tokens of a batch those
with the largest d^2 are masked until the mean of d^2 over the remaining ones is within the limit.
Masked tokens still count in the denominators of the loss, under `normalize_by: all`. Source: M2PO
(Zheng, Zhao, Chen, arXiv 2510.01161, algorithm 1; github.com/Infini-AI-Lab/M2PO, which has the
same tokens and mean, and clips where the paper masks).

Invariant: the mask does not depend on the order of the tokens; of equally large ones all are
masked or none. A batch without harmful tokens, such as one on policy, keeps all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SecondMoment:
    keep: Tensor
    """[R] bool."""
    metrics: dict[str, float]
    """Under `mismatch/`: the mean of d^2 over harmful tokens before the masking, and the share of
    all tokens that is masked."""


def bound_second_moment(
    log_ratio: Tensor, advantages: Tensor, counted: Tensor, limit: float
) -> SecondMoment:
    """The mask for a whole batch.

    Args:
        log_ratio: [R] d; may be non-finite where `counted` is false.
        advantages: [R]; 0 for tokens that are not trained.
        counted: [R] bool, false for tokens that are taken out already.
        limit: on the mean of d^2.
    """
    is_harmful = counted & (advantages.sign() * log_ratio > 0)
    squares = log_ratio[is_harmful].double().square()
    keep = torch.ones_like(counted)
    keep[is_harmful] = squares < _smallest_masked(squares, limit)
    return SecondMoment(
        keep,
        {
            "mismatch/second_moment": float(squares.mean()) if len(squares) else 0.0,
            "mismatch/second_moment_masked_fraction": float((~keep).double().mean())
            if len(keep)
            else 0.0,
        },
    )


def _smallest_masked(squares: Tensor, limit: float) -> float:
    """The smallest of these [N] that has to go; infinity if all may stay."""
    ascending = squares.sort().values
    counts = torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    # Means of the smallest 1, 2, ... N: they never fall.
    too_large = (ascending.cumsum(0) / counts > limit).nonzero()
    return float(ascending[too_large[0]]) if len(too_large) else torch.inf
