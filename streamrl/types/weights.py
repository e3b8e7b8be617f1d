"""Records of a weight update: what a learner sends about a version, and a generator's report."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from streamrl.types.ranges import Count, NotNegative, PolicyVersion, Port, Text

ChecksumKey: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=64)]
Gpus: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=4096)]


class TensorSpec(Struct, frozen=True, array_like=True):
    """One entry of a manifest; `dtype` is torch's name without the prefix, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class BroadcastDifference(Struct, frozen=True, kw_only=True):
    """What a broadcast sends instead of buckets: the changes since the version named `base`.

    There is a frame of `frame_bytes` for each bucket, 0 if the bucket is unchanged; `checksums` are
    those of the result (see `streamrl.weights.transports.differences`).
    """

    base: str
    frame_bytes: tuple[Count, ...]
    checksums: bytes


class BroadcastEndpoint(Struct, frozen=True, kw_only=True, tag="broadcast"):
    """A torch.distributed group that the receiver joins at `rank`; rank 0 sends.

    `group` names the group in the store at `host`:`port`, which only those who know `key` can read
    (see `streamrl.weights.transports.groups`); buckets are slices of at most
    `bucket_bytes`, cut at tensor boundaries (see `streamrl.weights.layout`). With `verify` one
    keyed checksum per tensor follows the last bucket. `is_base`: the next version may come as a
    difference to this one; a `difference` is always verified.
    """

    host: str
    port: Port
    group: str
    rank: Count
    world_size: Count
    backend: str
    bucket_bytes: Count
    timeout_s: NotNegative
    key: str = ""
    verify: bool = False
    is_base: bool = False
    difference: BroadcastDifference | None = None


class FilesEndpoint(Struct, frozen=True, kw_only=True, tag="files"):
    """A safetensors file in a file system that sender and receiver share: a whole version, or the
    difference from the previous one, in buckets of at most `bucket_bytes`.

    `is_base`: the next file may be a difference to this one.
    """

    path: str
    bucket_bytes: Count = 256 * 2**20
    is_base: bool = False


class HostMemory(Struct, frozen=True, kw_only=True, tag="host"):
    """Memory whose owner hands a file descriptor to whoever connects to its `socket`; `inode` is
    the file's."""

    socket: Text
    inode: Annotated[int, Meta(ge=0)]
    num_bytes: Count


class CudaMemory(Struct, frozen=True, kw_only=True, tag="cuda"):
    """Memory of another process on the GPU with the UUID `gpu`; the fields are those of torch's own
    IPC."""

    gpu: str
    handle: bytes
    num_bytes: Count
    offset: Count
    counter: bytes
    counter_offset: Annotated[int, Meta(ge=0)]
    event: bytes
    waits_for_event: bool


class SharedEndpoint(Struct, frozen=True, kw_only=True, tag="shared"):
    """A range of the sender's memory that the receiver maps: the bytes from `start` of `memory`.

    They hold this version as long as the 8 bytes at `stamp_at` of `stamps` equal `stamp`.
    `checksums` has one per tensor, or is empty.
    """

    memory: HostMemory | CudaMemory
    start: Count
    stamps: HostMemory
    stamp_at: Count
    stamp: int
    bucket_bytes: Count
    checksums: bytes = b""


class HeldEndpoint(Struct, frozen=True, kw_only=True, tag="held"):
    """No tensors: the receiver's inference server already has the version through another
    receiver."""


Endpoint: TypeAlias = BroadcastEndpoint | FilesEndpoint | SharedEndpoint | HeldEndpoint


class Locality(Struct, frozen=True, kw_only=True):
    """Where weights are sent from or received: a machine, and its GPUs by UUID, one per rank.

    `host` is "" and `gpus` is () where they are unknown; on a CPU there are no `gpus`.
    """

    host: Text = ""
    device_type: Text = "cpu"
    gpus: Gpus = ()


class LoadReport(Struct, frozen=True, kw_only=True):
    """Seconds of one load: receiving; from the last byte until the new weights sample; and, within
    that, the pause in which no token was sampled."""

    transfer_s: NotNegative
    pause_s: NotNegative
    load_s: NotNegative = 0.0


class WeightUpdate(Struct, frozen=True, kw_only=True):
    """Announces that these tensors of this version can be received from this endpoint.

    `learner_id` identifies the learner process that made the version: after a resume the same
    number may mean other weights. `key` is the key of the version's checksums, a secret of the
    sender and its receivers. `manifest` is () when sent to a receiver that already has it, since a
    large model's takes 1.8 MB (`streamrl.weights.protocol`).
    """

    policy_version: PolicyVersion
    learner_id: str
    manifest: tuple[TensorSpec, ...]
    endpoint: Endpoint
    key: ChecksumKey
