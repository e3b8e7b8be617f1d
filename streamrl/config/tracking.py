"""`tracking`: where metrics go beside metrics.jsonl."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.addresses import LARGEST_PORT
from streamrl.config.section import NotNegative, Positive, Section

# Room for the ports above it, up to generator-999's.
Port: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_PORT - 1_100)]


class SampleSettings(Section):
    """What is kept of the texts that the policy writes, in samples.jsonl."""

    num_groups: NotNegative = 1
    """Groups of each step, with all their siblings; 0 keeps none."""
    max_bytes: Positive = 64 * 2**20
    """Of samples.jsonl and of samples.1.jsonl, which has what came before, together; the oldest
    samples are deleted."""
    table_every: Positive = 10
    """Steps between two tables of samples in TensorBoard, Weights & Biases and Trackio."""


class PrometheusSettings(Section):
    """A metrics endpoint on every daemon, for Prometheus."""

    enabled: bool = False
    """Serve http://HOST:PORT/metrics on each daemon."""
    host: str = "127.0.0.1"
    """Address to listen at. Whoever reaches it reads the metrics, without a key: off the loopback
    address, keep it on a network that you trust."""
    port: Port = 0
    """Of the buffer; the learner has the next one, the validator the one after that, and
    generator-N port + 10 + N. 0 picks free ones, which `run.folder`/.prometheus names."""


class TrackingSettings(Section):
    """metrics.jsonl is always written."""

    console: bool = True
    """One line a step in the learner's log."""
    tensorboard: bool = False
    """Event files in the run folder (`pip install 'streamrl[tensorboard]'`)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases (`pip install 'streamrl[wandb]'`)."""
    trackio: bool = False
    """Trackio, a dashboard on this machine: `trackio show --project streamrl`
    (`pip install 'streamrl[trackio]'`)."""
    project: str = "streamrl"
    """Project name at Weights & Biases and in Trackio."""
    prometheus: PrometheusSettings = PrometheusSettings()
    """Metrics of each daemon while it runs."""
    samples: SampleSettings = SampleSettings()
    """What is kept of the texts that the policy writes."""
