"""`tracking`: where metrics go in addition to metrics.jsonl."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.addresses import LARGEST_PORT
from streamrl.config.section import NotNegative, Positive, Section

# Room for the ports above it, up to generator-999's.
Port: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_PORT - 1_100)]


class SampleSettings(Section):
    """Texts of the policy that are kept in samples.jsonl."""

    num_groups: NotNegative = 1
    """Groups per step, with all siblings; 0: none."""
    max_bytes: Positive = 64 * 2**20
    """Most bytes of samples.jsonl and the older samples.1.jsonl together; the oldest are deleted
    first."""
    table_every: Positive = 10
    """Steps between tables of samples in TensorBoard, Weights & Biases and Trackio."""


class PrometheusSettings(Section):
    """A metrics endpoint on every daemon, for Prometheus."""

    enabled: bool = False
    """Serve http://HOST:PORT/metrics from each daemon."""
    host: str = "127.0.0.1"
    """Address it listens on, without authentication; use only a network that you trust."""
    port: Port = 0
    """Port of the buffer; the learner has port + 1, the validator + 2, generator-N + 10 + N. 0:
    free ports, listed in `run.folder`/.prometheus."""


class TrackingSettings(Section):
    """Where metrics go in addition to metrics.jsonl."""

    console: bool = True
    """One line per step in the learner's log."""
    tensorboard: bool = False
    """Event files in the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases."""
    trackio: bool = False
    """Trackio, a dashboard on this machine: `trackio show --project streamrl`."""
    project: str = "streamrl"
    """Name of the project in Weights & Biases and Trackio."""
    prometheus: PrometheusSettings = PrometheusSettings()
    samples: SampleSettings = SampleSettings()
