"""Trackers for TensorBoard, Weights & Biases and Trackio (each its own extra), which show samples
as rows of tables.

`TRAINED` are the columns of what a step has trained on, `HELD_OUT` those of a validation's table,
where the responses of all versions to one prompt follow each other. If there are several rewards,
each has its own column, by name. Texts lack the markup of the chat template.
"""

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.extras import missing
from streamrl.interfaces import Tracker
from streamrl.samples.record import cut, without_markup
from streamrl.tracking.groups import GROUPS, grouped
from streamrl.tracking.jsonl import VERSION

log = logging.getLogger(__name__)

TRAINED = (
    "step",
    "prompt",
    "response",
    "answer",
    "extracted",
    "reward",
    "version",
    "staleness",
    "environment",
)
HELD_OUT = ("prompt_index", "prompt", "answer", "version", "response", "extracted", "reward")
Samples: TypeAlias = Sequence[Mapping[str, Any]]
_REWARD = "reward/"
_LONGEST = 2000


def columns_of(columns: Sequence[str], samples: Samples) -> list[str]:
    """The columns, with one after `reward` for each reward of the samples if there are several."""
    names = dict.fromkeys(name for sample in samples for name in sample.get("rewards", ()))
    place = columns.index("reward") + 1
    own = [f"{_REWARD}{name}" for name in names] if len(names) > 1 else []
    return [*columns[:place], *own, *columns[place:]]


def rows(columns: Sequence[str], samples: Samples) -> list[list[Any]]:
    """One row for each sample; long texts are cut in the middle."""
    return [[_cell(sample, column) for column in columns] for sample in samples]


def markdown_table(columns: Sequence[str], samples: Samples) -> str:
    """A table in Markdown, which may contain HTML, so what the model wrote is escaped."""
    shown = columns_of(columns, samples)
    lines = [shown, ["---"] * len(shown), *rows(shown, samples)]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _cell(sample: Mapping[str, Any], column: str) -> Any:
    if column.startswith(_REWARD):
        return sample.get("rewards", {}).get(column.removeprefix(_REWARD))
    written = [m["content"] for m in sample["messages"]] if column == "response" else None
    value = sample.get(column) if written is None else "\n".join(written)
    if not isinstance(value, str):
        return value
    return cut(without_markup(value, sample.get("special_tokens", ())), _LONGEST)


def _escaped(value: Any) -> str:
    text = "" if value is None else str(value)
    special = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]()#+-.!|~$"})
    return escape(text.translate(special)).replace("\r", "").replace("\n", "<br>")


class TableTracker(Tracker):
    """A tracker that shows samples as tables."""

    def log_table(self, name: str, columns: Sequence[str], samples: Samples, step: int) -> None:
        """Show the samples of a step or version as a table with these columns."""
        raise NotImplementedError

    def log_samples(self, samples: Samples, step: int) -> None:
        self.log_table("samples", TRAINED, samples, step)

    def log_validation_samples(self, samples: Samples, policy_version: int) -> None:
        self.log_table("validation/samples", HELD_OUT, samples, policy_version)


class TensorboardTracker(TableTracker):
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
            # `log_validation` has added it at its version.
            is_repeated = name.startswith("validation/") and step != metrics.get(VERSION)
            if isinstance(value, int | float) and not is_repeated:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self.log(metrics, policy_version)

    def log_table(self, name: str, columns: Sequence[str], samples: Samples, step: int) -> None:
        self._writer.add_text(name, markdown_table(columns, samples), step)

    def close(self) -> None:
        self._writer.close()


FINISH_S = 120


class WandbTracker(TableTracker):
    """One W&B run per run folder, so a resumed run continues in the same charts.

    At the end uploads may take WANDB_FINISH_TIMEOUT seconds, by default FINISH_S; the rest stays in
    the run folder for `wandb sync`. So does everything if W&B does not answer when a run resumes.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("tracking.wandb:", error) from error
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_S))
        mode = config.tracking.wandb
        assert mode != "off", "open_trackers asks for none"
        file = config.run.path / "wandb-id"
        known = file.read_text() if file.exists() else None
        init = partial(
            wandb.init,
            project=config.tracking.project,
            name=config.run.name,
            id=known or uuid.uuid4().hex[:12],
            dir=config.run.path,
            resume="allow",
            config=config.shown(),
        )
        try:
            self._run = init(mode=mode)
        except wandb.errors.Error as error:
            is_answer = isinstance(error, wandb.errors.AuthenticationError)
            if known is None or is_answer or not isinstance(error, wandb.errors.CommError):
                raise ConfigError(f"tracking.wandb: was {mode!r}, and W&B says: {error}") from error
            log.warning("W&B gets nothing before `wandb sync --append`: %s", error)
            # W&B's process holds the id of a run that it could not begin.
            wandb.teardown()
            self._run = init(mode="offline")
        if known is None:
            write_file(file, self._run.id)
        self._run.define_metric("validation/*", step_metric=VERSION)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(grouped(metrics), step=step)

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        """Send with the next step's metrics; the x-axis is the version."""
        self._run.log(dict(metrics), commit=False)

    def log_table(self, name: str, columns: Sequence[str], samples: Samples, step: int) -> None:
        """Send the table with the next step's metrics."""
        from wandb import Table

        shown = columns_of(columns, samples)
        table = Table(columns=[*shown], data=rows(shown, samples))
        self._run.log({name: table}, commit=False)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(TableTracker):
    """One Trackio run per run folder, in Trackio's own folder (TRACKIO_DIR); nothing is sent
    elsewhere, unless Trackio's own variables name a Space or a server.

    Trackio removes nothing, so a step that a resumed run repeats keeps what was logged first, as
    with W&B. `run.path`/trackio-step contains the last logged step.
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
                config=config.shown(),
                resume="allow" if is_known else "never",
                # Each of these would start threads or a server.
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"tracking.trackio: Trackio says: {error}") from error

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step <= self._step:
            return
        # `log_validation` logs validation metrics at their version.
        own = {k: v for k, v in grouped(metrics).items() if not k.startswith("validation/")}
        self._run.log(own, step=step)
        write_file(self._file, str(step))
        self._step = step

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self._run.log(grouped(metrics), step=policy_version)

    def log_table(self, name: str, columns: Sequence[str], samples: Samples, step: int) -> None:
        shown = columns_of(columns, samples)
        self._run.log({name: self._table(columns=shown, data=rows(shown, samples))}, step=step)

    def close(self) -> None:
        self._run.finish()
