"""`tracking`: where metrics go beside metrics.jsonl."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from streamrl.config.addresses import LARGEST_PORT
from streamrl.config.section import NotNegative, Positive, Section

# Room for the ports above it, up to generator-999's.
Port: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_PORT - 1_100)]


class SampleSettings(Section):
    """Texts of the policy that are kept, in samples.jsonl."""

    num_groups: NotNegative = 1
    """Groups a step, with all siblings; 0: none."""
    max_bytes: Positive = 64 * 2**20
    """Of samples.jsonl and the older samples.1.jsonl together; the oldest go first."""
    table_every: Positive = 10
    """Steps between tables in TensorBoard, Weights & Biases and Trackio."""


class PrometheusSettings(Section):
    """An endpoint of metrics on every daemon."""

    enabled: bool = False
    """Serve http://HOST:PORT/metrics on each daemon."""
    host: str = "127.0.0.1"
    """Where it listens, without a key; keep it on a network that you trust."""
    port: Port = 0
    """Of the buffer; + 1 is the learner's, + 2 the validator's, + 10 + N that of generator-N. 0:
    free ones, named in `run.folder`/.prometheus."""


class TrackingSettings(Section):
    """Where metrics go beside metrics.jsonl."""

    console: bool = True
    """A line a step in the learner's log."""
    tensorboard: bool = False
    """Event files in the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases."""
    trackio: bool = False
    """A dashboard on this machine: `trackio show --project streamrl`."""
    project: str = "streamrl"
    """At Weights & Biases and in Trackio."""
    prometheus: PrometheusSettings = PrometheusSettings()
    samples: SampleSettings = SampleSettings()
