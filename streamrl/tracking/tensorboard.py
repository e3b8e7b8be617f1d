"""TensorBoard event files (extra: tensorboard)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.extras import missing
from streamrl.interfaces import Tracker
from streamrl.tracking.groups import GROUPS, grouped
from streamrl.tracking.jsonl import VERSION
from streamrl.tracking.tables import HELD_OUT, TRAINED, markdown_table


class TensorboardTracker(Tracker):
    """Scalars under the metrics' own names, and the charts of `GROUPS` as custom scalars;
    `first_step` and later steps are purged first."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tracking.tensorboard:", error) from error
        self._writer = SummaryWriter(folder, purge_step=first_step)
        self._writer.add_custom_scalars(
            {
                group.title: {c.title: ["Multiline", [*c.metrics]] for c in group.charts}
                for group in GROUPS
                if group.charts
            }
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in grouped(metrics).items():
            # At its version, by `log_validation`.
            is_repeated = name.startswith("validation/") and step != metrics.get(VERSION)
            if isinstance(value, int | float) and not is_repeated:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self.log(metrics, policy_version)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text("samples", markdown_table(TRAINED, samples), step)

    def log_validation_samples(
        self, samples: Sequence[Mapping[str, Any]], policy_version: int
    ) -> None:
        table = markdown_table(HELD_OUT, samples)
        self._writer.add_text("validation/samples", table, policy_version)

    def close(self) -> None:
        self._writer.close()
