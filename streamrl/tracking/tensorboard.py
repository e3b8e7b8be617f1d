"""TensorBoard event files (extra: tensorboard)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.tracking.tables import markdown_table
from streamrl.tracking.validation import VERSION


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
            # At its version, by `log_validation`.
            is_repeated = name.startswith("validation/") and step != metrics.get(VERSION)
            if isinstance(value, int | float) and not is_repeated:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self.log(metrics, policy_version)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text("samples", markdown_table(samples), step)

    def close(self) -> None:
        self._writer.close()
