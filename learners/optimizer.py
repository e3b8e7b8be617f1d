"""AdamW and its learning rate, as `learner.optimizer` describes them.

Invariant: the rate of a step is a function of the step alone, so a resumed run needs no scheduler
state.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch.nn.utils import clip_grad_norm_

from learners.parallel.sharding import full
from streamrl.config.learner import OptimizerSettings


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over the named parameters; vectors (norms, biases) are not decayed."""
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    exempt = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def update(
    optimizer: torch.optim.AdamW,
    parameters: Iterable[torch.nn.Parameter],
    rate: float,
    max_grad_norm: float | None,
    *,
    prefix: str,
    is_frozen: bool = False,
) -> dict[str, float]:
    """Clip the gradient, step, clear it; metrics under `prefix`.

    A gradient that is not finite changes nothing and is counted. With `is_frozen` no gradient
    changes anything.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = float(full(clip_grad_norm_(parameters, max_grad_norm or math.inf)))
    is_finite = math.isfinite(norm)
    if is_finite and not is_frozen:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        f"{prefix}/grad_norm": norm if is_finite else -1.0,
        f"{prefix}/skipped_update": float(not is_finite),
        f"{prefix}/lr": rate,
    }


def learning_rate(step: int, settings: OptimizerSettings, max_steps: int) -> float:
    """Of the step that is about to be made, counted from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    span = max(1, max_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    match settings.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.min_lr_ratio if settings.schedule != "constant" else 1.0
    return settings.lr * (floor + (1.0 - floor) * share)
