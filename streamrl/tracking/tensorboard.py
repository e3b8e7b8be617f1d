"""TensorBoard event files (extra: tensorboard)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError


class TensorboardTracker:
    """Scalars under the metrics' own names; `first_step` and later steps are purged first."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tracking.tensorboard: is not installed: pip install 'streamrl[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
