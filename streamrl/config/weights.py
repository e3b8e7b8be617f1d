"""`weights`: how a version gets from the learner to the generators."""

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from streamrl.config.addresses import STORES, StoreUrl, is_any, require_places
from streamrl.config.section import Dtype, Positive, Seconds, Section


class WeightSettings(Section):
    """How a version of the weights reaches the generators."""

    address: str = "tcp://127.0.0.1:0"
    """Where the learner announces weights; off loopback it needs `buffer.curve`."""
    transport: Literal["broadcast", "files", "store"] = "broadcast"
    """broadcast: as `backend` says. files: in the run's folder, on a shared file system. store: by
    `weights.store` alone."""
    store: StoreUrl | None = None
    """Where the learner also writes versions, for generators with `transport: store`:
    s3://BUCKET/FOLDER, gs://, hf://buckets/USER/BUCKET or file:///FOLDER, a folder for each run."""
    backend: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """auto: shared memory on the learner's machine; for others nccl if all have GPUs of their own,
    else gloo."""
    catch_up: Literal["broadcast", "files"] = "files"
    """How a late generator gets the last version."""
    publish_every: Positive = 1
    """Steps between published versions."""
    dtype: Dtype | Literal["float8_e4m3fn"] | None = None
    """Cast on send; null: the learner's. float8_e4m3fn casts matrices, which moves a weight by up
    to 1/16."""
    bucket_bytes: Positive = 256 * 2**20
    """Of one broadcast; two are under way at a time."""
    delta: bool = False
    """Files and gloo broadcasts hold only what changed: for links below about 5 Gbit/s."""
    full_every: Positive = 50
    """Differences, by delta or in a store, until a whole version."""
    verify: bool = False
    """Compare a checksum of every tensor by every route; files, and gloo between machines, always
    do."""
    deadline_s: Seconds = 30.0
    """Longest hop of an update; who exceeds it is left out of it."""

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

    def contradictions(self) -> Iterator[str]:
        if self.transport == "store" and self.store is None:
            yield f"""weights.transport store needs weights.store, where the learner writes the
                versions: {", ".join(STORES.values())}"""
        if self.delta and self.transport == "store":
            yield """weights.delta is for weights.transport broadcast and files; a store has
                differences in any case: remove it"""
        if self.delta and self.transport == "broadcast" and self.backend in ("shared", "nccl"):
            yield f"""weights.delta is for broadcasts by gloo and for files; weights.backend was
                {self.backend}, which is faster without: set it to auto or gloo, or remove delta"""
