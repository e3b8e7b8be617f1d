"""`weights`: how a version gets from the learner to the generators."""

from typing import Literal

from pydantic import field_validator, model_validator

from streamrl.config.addresses import STORES, StoreUrl, is_any, require_places
from streamrl.config.section import Dtype, Positive, Seconds, Section


class WeightSettings(Section):
    """How a version of the weights reaches the generators."""

    address: str = "tcp://127.0.0.1:0"
    """Where the learner announces weights; generators connect to it. Any but a loopback address
    needs the keys of `buffer.curve`."""
    transport: Literal["broadcast", "files", "store"] = "broadcast"
    """What generators get their weights by. broadcast: shared memory or torch.distributed, see
    `backend`. files: safetensors in the run folder (a shared file system). store: `weights.store`
    alone, without a connection to `weights.address`."""
    store: StoreUrl | None = None
    """Where the learner also writes every version it can, for generators elsewhere, which follow
    with `transport: store`: s3://BUCKET/FOLDER, gs://, hf://buckets/USER/BUCKET or file:///FOLDER.
    Each run has a folder of its name there."""
    backend: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """What a broadcast goes by. auto: memory that generators on the learner's machine (with a
    learner on a GPU: on that GPU) share with it, without a socket; for the others nccl if all are
    on different GPUs, else gloo. shared: by such memory alone; who cannot open it is refused."""
    catch_up: Literal["broadcast", "files"] = "files"
    """How a generator that joins late gets the last published version."""
    publish_every: Positive = 1
    """Steps between published versions."""
    dtype: Dtype | Literal["float8_e4m3fn"] | None = None
    """Cast on send; null sends the learner's own precision. float8_e4m3fn is for matrices, with a
    scale for each 128 x 128 block: each weight moves by up to 1/16, and the mismatch shows it."""
    bucket_bytes: Positive = 256 * 2**20
    """Bytes of one broadcast; two are under way at a time."""
    delta: bool = False
    """Files hold only what changed since the version before; for transport files. Costs memory for
    one more copy at the learner."""
    full_every: Positive = 50
    """With delta, and in a store: differences until there is a whole file again; in files, who
    lacks the version before gets one at once."""
    verify: bool = False
    """Compare a keyed checksum of every tensor by every route (files, and gloo broadcasts between
    machines, always carry them); a difference fails the load, and the old weights stay."""
    deadline_s: Seconds = 30.0
    """Longest wait for one hop of an update; who exceeds it is left out until it catches up."""

    @field_validator("address")
    @classmethod
    def _is_tcp(cls, address: str) -> str:
        if not address.startswith("tcp://"):
            raise ValueError(f"was {address!r}; it must be tcp://host:port")
        require_places(address, needs_port=True)
        if is_any(address):
            raise ValueError(
                f"was {address!r}; name the address at which generators reach the learner, which "
                "they are told for broadcasts"
            )
        return address

    @model_validator(mode="after")
    def _has_a_store(self) -> "WeightSettings":
        if self.transport == "store" and self.store is None:
            raise ValueError(
                "weights.transport store needs weights.store, where the learner writes the "
                f"versions: {', '.join(STORES.values())}"
            )
        return self

    @model_validator(mode="after")
    def _has_files_for_delta(self) -> "WeightSettings":
        if self.delta and self.transport != "files":
            raise ValueError(
                f"weights.delta is for weights.transport files, which was {self.transport}"
            )
        return self
