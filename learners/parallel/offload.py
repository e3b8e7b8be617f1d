"""What a GPU does not need all the time, in the memory of the host (`learner.offload`).

Invariant: results are those without; each option moves memory alone.
"""

import torch

from streamrl.config.learner import OffloadSettings
from streamrl.errors import ConfigError


def require_gpu(settings: OffloadSettings, device: torch.device) -> None:
    """Refuse to offload what is in the host's memory anyway.

    Raises:
        ConfigError: an option is on and `device` is the CPU.
    """
    if settings.chosen and device.type == "cpu":
        raise ConfigError(
            f"learner.offload.{settings.chosen[0]} moves memory from a GPU to the host, and the "
            f"learner runs on {device}: leave it out"
        )


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Its state is beside its parameters during a step, and in the host's memory otherwise."""
    optimizer.register_step_pre_hook(lambda *_: _move(optimizer, to_host=False))
    optimizer.register_step_post_hook(lambda *_: _move(optimizer, to_host=True))


def _move(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """The moments; the count of steps is one number and stays where the optimizer put it."""
    for parameter, state in optimizer.state.items():
        device = torch.device("cpu") if to_host else parameter.device
        moments = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and t.ndim}
        state.update({name: moment.to(device) for name, moment in moments.items()})
