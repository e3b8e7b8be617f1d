"""What a learner announces of a new version, and what a generator says it did with it."""

from msgspec import Struct


class TensorSpec(Struct, frozen=True, array_like=True):
    """One entry of a manifest; `dtype` is torch's name without the prefix, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BroadcastEndpoint(Struct, frozen=True, kw_only=True, tag="broadcast"):
    """A torch.distributed group that the receiver joins at `rank`; rank 0 sends.

    `group` names the group in the store; buckets are slices of at most `bucket_bytes`, cut at
    tensor boundaries (see `streamrl.weights.layout`). With `verify` one checksum per tensor comes
    after the last bucket.
    """

    host: str
    port: int
    group: str
    rank: int
    world_size: int
    backend: str
    bucket_bytes: int
    timeout_s: float
    verify: bool = False


class FilesEndpoint(Struct, frozen=True, kw_only=True, tag="files"):
    """A safetensors file that sender and receiver both see: a whole version, or the difference to
    the one before, in buckets of at most `bucket_bytes`.

    `is_base` announces that the next file may be a difference to this one.
    """

    path: str
    bucket_bytes: int = 256 * 2**20
    is_base: bool = False


class LoadReport(Struct, frozen=True, kw_only=True):
    """What one load cost: receiving; from the last byte until the new weights sample; and, within
    that, the pause in which no token was sampled."""

    transfer_s: float
    pause_s: float
    load_s: float = 0.0


class WeightUpdate(Struct, frozen=True, kw_only=True):
    """An announcement: these tensors, of this version, are to be had at this endpoint.

    `history` names the learner life that made the version: after a resume the same number may stand
    for other weights.
    """

    policy_version: int
    history: str
    manifest: tuple[TensorSpec, ...]
    endpoint: BroadcastEndpoint | FilesEndpoint
