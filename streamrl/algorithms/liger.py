"""Liger's fused log-probabilities, where they can be used and the installed version is right."""

from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

from streamrl.algorithms.logit_transform import LogitTransform
from streamrl.errors import ConfigError

WRONG_LIGER = ("0.8.0", "0.8.1")


def takes_liger(device: torch.device, trains_entropy: bool) -> bool:
    """Liger's kernels run on a GPU, and give log-probabilities alone."""
    return device.type == "cuda" and not trains_entropy and has_liger()


@cache
def has_liger() -> bool:
    """Whether liger-kernel is there.

    Raises:
        ConfigError: it is a version with wrong gradients.
    """
    if find_spec("liger_kernel") is None:
        return False
    if (installed := version("liger-kernel")) in WRONG_LIGER:
        raise ConfigError(
            f"liger-kernel {installed} is installed, which scales all gradients by that of the "
            "first token; install 0.8.2 or later, or remove it"
        )
    return True


def fused_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor | None:
    """Minus Liger's per-token cross-entropy; None where it cannot express the transform."""
    if transform.softcap is not None and transform.temperature != 1.0:
        return None
    liger = import_module("liger_kernel.transformers.functional")
    if transform.slope != 1.0:
        hidden = hidden * transform.slope
        bias = None if bias is None else bias * transform.slope
    losses: Tensor = liger.liger_fused_linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        reduction="none",
        softcap=transform.softcap,
        accum_dtype=torch.float32,
    )
    return -losses
