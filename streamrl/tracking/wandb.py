"""Weights & Biases, online or offline (extra: wandb)."""

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.extras import missing
from streamrl.interfaces import Tracker
from streamrl.tracking.groups import grouped
from streamrl.tracking.jsonl import VERSION
from streamrl.tracking.tables import HELD_OUT, TRAINED, columns_of, rows

FINISH_S = 120


class WandbTracker(Tracker):
    """One W&B run per run folder, so a resumed run continues in the same charts.

    At the end uploads may take WANDB_FINISH_TIMEOUT seconds, by default FINISH_S; the rest stays in
    the run folder, for `wandb sync`.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("tracking.wandb:", error) from error
        if config.tracking.wandb == "off":
            raise ConfigError("tracking.wandb: is off")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_S))
        try:
            self._run = wandb.init(
                project=config.tracking.project,
                name=config.run.name,
                id=_identity(config.run.path / "wandb-id"),
                dir=config.run.path,
                mode=config.tracking.wandb,
                resume="allow",
                config=config.model_dump(mode="json"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"tracking.wandb: was {config.tracking.wandb!r}, and W&B says: {error}"
            ) from error
        self._run.define_metric("validation/*", step_metric=VERSION)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(grouped(metrics), step=step)

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        """With the next step's metrics, over the version as their x-axis."""
        self._run.log(dict(metrics), commit=False)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self._log_table("samples", TRAINED, samples)

    def log_validation_samples(
        self, samples: Sequence[Mapping[str, Any]], policy_version: int
    ) -> None:
        """With the next step's metrics, as the validation's own."""
        self._log_table("validation/samples", HELD_OUT, samples)

    def _log_table(
        self, name: str, columns: Sequence[str], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        from wandb import Table

        shown = columns_of(columns, samples)
        table = Table(columns=[*shown], data=rows(shown, samples))
        self._run.log({name: table}, commit=False)

    def close(self) -> None:
        self._run.finish()


def _identity(path: Path) -> str:
    """The id of the W&B run, made once per run folder."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
