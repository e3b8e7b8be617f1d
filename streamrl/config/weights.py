"""`weights`: how weight versions get from the learner to the generators."""

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from streamrl.config.addresses import STORES, StoreUrl, is_any, require_places
from streamrl.config.section import Dtype, Positive, Seconds, Section


class WeightSettings(Section):
    """How weight versions reach the generators."""

    address: str = "tcp://127.0.0.1:0"
    """Address at which the learner announces weights; other than loopback, it needs
    `buffer.curve`."""
    transport: Literal["broadcast", "files", "store"] = "broadcast"
    """broadcast: by `backend`. files: through the run folder, on a shared file system. store:
    through `weights.store` alone."""
    store: StoreUrl | None = None
    """Object store for generators with `transport: store`, a folder for each run:
    s3://BUCKET/FOLDER, gs://, hf://buckets/USER/BUCKET or file:///FOLDER."""
    backend: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """auto: shared memory on the learner's machine; to others nccl if each has its own GPU,
    otherwise gloo."""
    catch_up: Literal["broadcast", "files"] = "files"
    """How a generator that joins late gets the latest version."""
    publish_every: Positive = 1
    """Steps between published versions."""
    dtype: Dtype | Literal["float8_e4m3fn"] | None = None
    """Dtype of weights when sent; null: the learner's. float8_e4m3fn is for matrices, and changes a
    weight by up to 1/16."""
    bucket_bytes: Positive = 256 * 2**20
    """Bytes of one broadcast; two are in progress at a time."""
    delta: bool = False
    """Send only what changed, in files and gloo broadcasts: for links below about 5 Gbit/s."""
    full_every: Positive = 50
    """Number of differences, by `delta` or in a store, between whole versions."""
    verify: bool = False
    """Compare checksums of every tensor on all routes; files, and gloo between machines, always
    do."""
    deadline_s: Seconds = 30.0
    """Longest hop of an update in seconds; slower generators are left out of it."""

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
