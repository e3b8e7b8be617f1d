"""AdamW, its learning rate and its updates, as `learner.optimizer` describes them.

Invariant: the learning rate depends on the step and its data alone, so a resumed run needs no
scheduler state. An update whose gradient is not finite changes nothing; too many in a row end the
run.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learners.parallel.mesh import full
from streamrl.algorithms.rollout_is import SEQUENCE_ESS
from streamrl.config.learner import OptimizerGroup, OptimizerSettings
from streamrl.errors import ConfigError, DivergedError, did_you_mean

log = logging.getLogger(__name__)

_GROWTH_INTERVAL = 2000
LR_RATIO = "lr_ratio"
"""Key of a parameter group: its learning rate as a multiple of `learner.optimizer.lr`."""


def make_optimizer(
    parameters: Mapping[str, Parameter], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over the named parameters; vectors (norms, biases) get no weight decay.

    Raises:
        ConfigError: a pattern of `settings.groups` matches no parameter that is left to it.
    """
    found = {name: _find(name, settings.groups) for name in parameters}
    for index, group in enumerate(settings.groups):
        if group not in found.values():
            field = f"learner.optimizer.groups.{index}.parameters"
            raise ConfigError(f"{field}: {_unmatched(group.parameters, parameters)}")
    alike: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in parameters.items():
        key = _rate_and_decay(parameter, found[name], settings)
        alike.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": of_mesh, LR_RATIO: lr / settings.lr, "weight_decay": decay}
            for (lr, decay), members in alike.items()
            for of_mesh in by_mesh(members)
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def update(
    optimizer: torch.optim.AdamW,
    parameters: Iterable[Parameter],
    rate: float,
    max_grad_norm: float | None,
    *,
    prefix: str,
    is_frozen: bool = False,
    loss_scale: float = 1.0,
) -> dict[str, float]:
    """Clip the gradient, step, clear it; metrics under `prefix`.

    A gradient that is not finite changes nothing and is counted; with `is_frozen` none changes
    anything. The gradient is divided by `loss_scale`, which the loss was multiplied by.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group[LR_RATIO]
    parameters = tuple(parameters)
    if loss_scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(loss_scale)
    norm = clip_gradients(parameters, max_grad_norm)
    is_finite = math.isfinite(norm)
    if is_finite and not is_frozen:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        f"{prefix}/grad_norm": norm if is_finite else -1.0,
        f"{prefix}/skipped_update": float(not is_finite),
        f"{prefix}/lr": rate,
    }


class LossScale:
    """The factor of losses before the backward pass, so that float16 can hold their gradients; 1
    for other dtypes.

    Follows the rule of `torch.amp.GradScaler`, which takes no sharded gradients: halves after an
    update with a gradient that is not finite, doubles after 2,000 good updates in a row.
    """

    def __init__(self, dtype: str) -> None:
        self.is_on = dtype == "float16"
        self.value = 2.0**16 if self.is_on else 1.0
        self._num_finite = 0

    def follow(self, metrics: Mapping[str, float]) -> bool:
        """Adjust the scale after an update with these metrics; whether the update was skipped
        because the scale was too high."""
        if not self.is_on:
            return False
        if was_skipped(metrics):
            self._num_finite, self.value = 0, self.value / 2
            log.info("a gradient overflowed: the scale of losses is %g now", self.value)
            return self.value >= 1
        self._num_finite += 1
        if self._num_finite == _GROWTH_INTERVAL:
            self._num_finite, self.value = 0, self.value * 2
        return False

    def state_dict(self) -> dict[str, float]:
        """Empty if losses are not scaled."""
        return {"loss_scale": self.value, "num_finite": self._num_finite} if self.is_on else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The saved run may have had another dtype."""
        if self.is_on:
            self.value = state.get("loss_scale", self.value)
            self._num_finite = int(state.get("num_finite", 0))


def was_skipped(metrics: Mapping[str, float]) -> bool:
    """Whether the metrics of `update` say that a gradient of policy or critic was not finite."""
    return any(metrics.get(f"{prefix}/skipped_update") for prefix in ("learner", "critic"))


class SkippedUpdates:
    """Counts consecutive skipped updates and ends the run above the limit. Not kept across
    restarts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0

    def count(self, metrics: Mapping[str, float], policy_version: int) -> None:
        """Count an update of this version by the metrics of `update`; DivergedError above the
        limit."""
        if not was_skipped(metrics):
            self._num = 0
            return
        self._num += 1
        sentence = f"the gradient of step {policy_version + 1} is not finite: "
        if self._num > self._limit:
            raise DivergedError(
                f"{sentence}{self._num} updates in a row were skipped, and "
                f"learner.optimizer.max_skipped_updates is {self._limit}; lower "
                "learner.optimizer.lr, or go on from an older checkpoint (run.resume)"
            )
        log.warning("%sits update is skipped, %d in a row", sentence, self._num)


def learning_rate(step: int, settings: OptimizerSettings, max_steps: int) -> float:
    """The learning rate of a step, counted from 0."""
    num_warmup = settings.num_warmup_steps(max_steps)
    if step < num_warmup:
        return settings.lr * (step + 1) / num_warmup
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            share = 1.0 - _progress(step, num_warmup, max_steps)
        case "cosine":
            share = _cosine(2.0 * settings.num_cycles * _progress(step, num_warmup, max_steps))
        case "warmup_stable_decay":
            num_decay = settings.num_decay_steps(max_steps)
            share = _decay(_progress(step, max_steps - num_decay, max_steps), settings)
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


def rate_scale(metrics: Mapping[str, float]) -> float:
    """What `rollout_is.scale_lr` multiplies the rate by (VCPO, arXiv 2602.17616, section 3.2):
    sqrt(ESS / B), with ESS = (sum w)^2 / sum w^2 of B sequences."""
    return math.sqrt(metrics.get(SEQUENCE_ESS, 1.0))


def _progress(step: int, first: int, last: int) -> float:
    """From 0 at `first` to 1 at `last`."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _cosine(half_waves: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * half_waves))


def _decay(progress: float, settings: OptimizerSettings) -> float:
    match settings.decay_shape:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return _cosine(progress)
        case "1-sqrt":
            return 1.0 - math.sqrt(progress)


def _find(name: str, groups: Iterable[OptimizerGroup]) -> OptimizerGroup | None:
    return next((group for group in groups if fnmatchcase(name, group.parameters)), None)


def _rate_and_decay(
    parameter: Parameter, group: OptimizerGroup | None, settings: OptimizerSettings
) -> tuple[float, float]:
    lr = settings.lr if group is None or group.lr is None else group.lr
    usual = settings.weight_decay if parameter.ndim >= 2 else 0.0
    return lr, usual if group is None or group.weight_decay is None else group.weight_decay


def _unmatched(pattern: str, parameters: Iterable[str]) -> str:
    if any(fnmatchcase(name, pattern) for name in parameters):
        return f"was {pattern!r}, whose parameters earlier groups have; put it before them"
    hint = did_you_mean(pattern, parameters)
    if not hint.startswith("did you mean"):
        # Patterns seldom hold whole names.
        parts = {part for name in parameters for part in name.split(".") if not part.isdigit()}
        hint = f"names have the parts {', '.join(sorted(parts))}"
    return f"was {pattern!r}, which matches no parameter; {hint}"


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Keep the optimizer's state in host memory, except during a step."""
    optimizer.register_step_pre_hook(lambda *_: move_state(optimizer, to_host=False))
    optimizer.register_step_post_hook(lambda *_: move_state(optimizer, to_host=True))


def move_state(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """Move the moments; the step count is one number and stays where the optimizer put it."""
    for parameter, state in optimizer.state.items():
        device = torch.device("cpu") if to_host else parameter.device
        moments = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and t.ndim}
        state.update({name: moment.to(device) for name, moment in moments.items()})


def by_mesh(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Group tensors by mesh, keeping their order. Tensor parallelism leaves several meshes, and
    torch's list operations, which AdamW and the norm use, take one mesh at a time."""
    ordered = list(parameters)
    meshes = dict.fromkeys(_mesh(p) for p in ordered)
    return [[p for p in ordered if _mesh(p) == mesh] for mesh in meshes]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Parameter], max_norm: float | None) -> float:
    """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before.
    All ranks call it together and get the same result."""
    parts = by_mesh(p for p in parameters if p.grad is not None)
    norms = [full(get_total_norm([p.grad for p in part if p.grad is not None])) for part in parts]
    total = norms[0] if len(norms) == 1 else torch.stack(norms or [torch.zeros(())]).norm()
    if max_norm is not None:
        for part in parts:
            clip_grads_with_norm_(part, max_norm, total)
    return float(total)


def _mesh(parameter: Parameter) -> Any:
    """None for a tensor that is not sharded."""
    return getattr(parameter, "device_mesh", None)
