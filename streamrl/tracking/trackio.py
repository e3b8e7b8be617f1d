"""Trackio, a dashboard on this machine: `trackio show --project streamrl` (extra: trackio)."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.extras import missing
from streamrl.interfaces import Tracker
from streamrl.tracking.groups import grouped
from streamrl.tracking.tables import HELD_OUT, TRAINED, columns_of, rows


class TrackioTracker(Tracker):
    """One Trackio run per run folder, in Trackio's own folder (TRACKIO_DIR); nothing is sent
    elsewhere, unless Trackio's own variables name a Space or a server.

    A resumed run continues in the same charts. Trackio removes nothing, so the steps that are made
    again keep what was logged first, as at W&B. `run.folder`/trackio-step has the last one.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing("tracking.trackio:", error) from error
        self._table = trackio.Table
        self._file = config.run.path / "trackio-step"
        is_known = self._file.exists()
        self._step = int(self._file.read_text()) if is_known else 0
        try:
            self._run = trackio.init(
                project=config.tracking.project,
                name=config.run.name,
                config=config.model_dump(mode="json"),
                resume="allow" if is_known else "never",
                # Each would start threads or a server of its own.
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"tracking.trackio: Trackio says: {error}") from error

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step <= self._step:
            return
        # Those of a validation are logged at its version.
        own = {k: v for k, v in grouped(metrics).items() if not k.startswith("validation/")}
        self._run.log(own, step=step)
        self._file.write_text(str(step))
        self._step = step

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self._run.log(grouped(metrics), step=policy_version)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self._log_table("samples", TRAINED, samples, step)

    def log_validation_samples(
        self, samples: Sequence[Mapping[str, Any]], policy_version: int
    ) -> None:
        self._log_table("validation/samples", HELD_OUT, samples, policy_version)

    def _log_table(
        self, name: str, columns: Sequence[str], samples: Sequence[Mapping[str, Any]], step: int
    ) -> None:
        shown = columns_of(columns, samples)
        self._run.log({name: self._table(columns=shown, data=rows(shown, samples))}, step=step)

    def close(self) -> None:
        self._run.finish()
