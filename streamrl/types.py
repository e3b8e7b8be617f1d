"""What crosses a process: frozen records with numpy arrays, checked where they are made.

Invariant: a record that exists is well formed. `__post_init__` runs on construction and again on
decode, so no reader checks shapes a second time. Shapes: T tokens of a trajectory, N tokens of a
completion. Log-probabilities are in nats. Nothing here is ever changed in place.
"""

from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a completion, and with it a trajectory, ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class DropReason(StrEnum):
    """Why a lease or its group left the books without being trained.

    `EXPIRED`, `RELEASED` and `ORPHANED` end a lease only: its sequence is granted again, so the
    prompt is not skipped. The others end the sequence.
    """

    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    RELEASED = "released"
    ORPHANED = "orphaned"

    @property
    def returns_sequence(self) -> bool:
        return self in (DropReason.EXPIRED, DropReason.RELEASED, DropReason.ORPHANED)


class RefusalReason(StrEnum):
    """Why a put was turned away: it held no live lease, so it never was in the books."""

    DUPLICATE = "duplicate"
    UNKNOWN_LEASE = "unknown_lease"
    MALFORMED = "malformed"


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one completion is sampled; `top_k` 0 and `top_p` 1.0 switch truncation off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """One reply of an engine.

    `logprobs` [N] are under the distribution actually sampled from (after temperature, top-k and
    top-p); greedy decoding reports them at temperature 1. `policy_versions` [N] is the version
    whose weights sampled each token.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    policy_versions: Int32Array
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        _require_one_length(self, "token_ids", "logprobs", "policy_versions")


class Turn(Struct, frozen=True, kw_only=True):
    """Facts of one exchange: tokens observed, tokens sampled, tool calls made."""

    num_observation_tokens: int
    num_completion_tokens: int
    finish_reason: FinishReason
    num_tool_calls: int = 0


GREEDY_REWARD = "greedy_reward"
"""The metric of a trajectory under which the reward of its prompt's greedy completion stands."""

INVALID_TURNS = "num_invalid_turns"
"""The metric under which an environment counts turns that broke its format."""


class Trajectory(Struct, frozen=True, kw_only=True):
    """The record of one rollout: facts only, never an advantage.

    `response_mask` [T] is true where the policy sampled the token; there `behavior_logprobs` [T]
    (nats) and `policy_versions` [T] hold, elsewhere they are 0 and -1.
    """

    token_ids: Int32Array
    response_mask: BoolArray
    behavior_logprobs: Float32Array
    policy_versions: Int32Array
    reward: float
    finish_reason: FinishReason
    turns: tuple[Turn, ...] = ()
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        _require_one_length(
            self, "token_ids", "response_mask", "behavior_logprobs", "policy_versions"
        )
        if not self.num_tokens:
            raise ValueError("token_ids: is empty; a trajectory holds at least its prompt")
        if not np.isfinite(self.reward):
            raise ValueError(f"reward: is {self.reward}; it must be finite")
        mask = self.response_mask
        if not np.isfinite(self.behavior_logprobs).all():
            raise ValueError("behavior_logprobs: has NaN or infinite values")
        if (self.behavior_logprobs[~mask] != 0).any():
            raise ValueError("behavior_logprobs: must be 0 where response_mask is off")
        if ((self.policy_versions >= 0) != mask).any():
            raise ValueError("policy_versions: must be >= 0 where response_mask is on, else -1")
        if self.token_ids.min() < 0:
            raise ValueError("token_ids: has a negative id")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Smallest version that sampled a token; None if none was sampled."""
        versions = self.policy_versions[self.response_mask]
        return int(versions.min()) if len(versions) else None


class TrajectoryGroup(Struct, frozen=True, kw_only=True):
    """The siblings of one prompt: admitted, buffered, taken, trained and accounted as one."""

    group_id: str
    sequence: int
    environment: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError("trajectories: is empty; a group holds at least one")
        if self.sequence < 0:
            raise ValueError(f"sequence: is {self.sequence}; it must be >= 0")
        if all(t.oldest_version is None for t in self.trajectories):
            raise ValueError("trajectories: none holds a sampled token")

    @property
    def oldest_version(self) -> int:
        """Smallest policy version over all sampled tokens of the group."""
        return min(v for t in self.trajectories if (v := t.oldest_version) is not None)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


class GroupHeader(Struct, frozen=True, kw_only=True):
    """What the ledger and the learner's planning need of a group, without its payload."""

    group_id: str
    sequence: int
    environment: str
    oldest_version: int
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    num_bytes: int = 0

    @classmethod
    def of(cls, group: TrajectoryGroup, num_bytes: int = 0) -> "GroupHeader":
        return cls(
            group_id=group.group_id,
            sequence=group.sequence,
            environment=group.environment,
            oldest_version=group.oldest_version,
            lengths=tuple(t.num_tokens for t in group.trajectories),
            rewards=tuple(t.reward for t in group.trajectories),
            num_bytes=num_bytes,
        )


class Lease(Struct, frozen=True, kw_only=True):
    """The right to generate one group.

    `sequence` is its place in the seeded prompt stream. `policy_version` is a floor: sampled by an
    older version, the group would be too stale by the time its turn comes. `expires_at_s` is on the
    buffer's clock.
    """

    lease_id: str
    sequence: int
    policy_version: int
    expires_at_s: float


class Books(Struct, frozen=True, kw_only=True):
    """The ledger's account: every lease ever granted is in exactly one column.

    `open_sequences` are those neither acknowledged nor dropped for good; with `next_sequence` they
    are the position in the prompt stream, so a learner's checkpoint restores it from here.
    `revision` grows with every change: of two accounts of one run, the larger is the later.
    `epoch` counts the learners that attached.
    """

    granted: int = 0
    leased: int = 0
    buffered: int = 0
    taken: int = 0
    trained: int = 0
    acknowledged: int = 0
    dropped: dict[DropReason, int] = {}
    next_sequence: int = 0
    revision: int = 0
    epoch: int = 0
    open_sequences: tuple[int, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether the books close: the columns add up to the leases granted."""
        columns = self.leased + self.buffered + self.taken + self.trained + self.acknowledged
        return self.granted == columns + sum(self.dropped.values())


class GeneratorStatus(Struct, frozen=True, kw_only=True):
    """What a generator says of itself in each heartbeat. `session` is new for every process."""

    generator_id: str
    session: str
    policy_version: int
    lease_ids: tuple[str, ...] = ()
    num_active: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    pause_s: float = 0.0
    is_leaving: bool = False


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """The buffer's answer: where the learner is, and which held leases are no longer honoured."""

    policy_version: int
    lost_lease_ids: tuple[str, ...] = ()
    finished: bool = False


class BufferStats(Struct, frozen=True, kw_only=True):
    """A reading of the buffer; `incarnation` is new for every start of its server."""

    incarnation: str
    policy_version: int
    groups_per_step: int
    max_staleness: int
    books: Books
    refused: dict[RefusalReason, int] = {}
    oldest_version: int | None = None
    num_bytes: int = 0
    generators: tuple[GeneratorStatus, ...] = ()
    finished: bool = False


class TensorSpec(Struct, frozen=True, array_like=True):
    """One entry of a manifest; `dtype` is torch's name without the prefix, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BroadcastEndpoint(Struct, frozen=True, kw_only=True, tag="broadcast"):
    """A torch.distributed group that the receiver joins at `rank`; rank 0 sends.

    `group` names the group in the store; buckets are slices of at most `bucket_bytes`, cut at
    tensor boundaries (see `streamrl.weights.layout`).
    """

    host: str
    port: int
    group: str
    rank: int
    world_size: int
    backend: str
    bucket_bytes: int
    timeout_s: float


class FilesEndpoint(Struct, frozen=True, kw_only=True, tag="files"):
    """A safetensors file that sender and receiver both see."""

    path: str


class LoadReport(Struct, frozen=True, kw_only=True):
    """What one load cost: receiving, and the pause in which no token was sampled."""

    transfer_s: float
    pause_s: float


class WeightUpdate(Struct, frozen=True, kw_only=True):
    """An announcement: these tensors, of this version, are to be had at this endpoint.

    `history` names the learner life that made the version: after a resume the same number may stand
    for other weights.
    """

    policy_version: int
    history: str
    manifest: tuple[TensorSpec, ...]
    endpoint: BroadcastEndpoint | FilesEndpoint


def _require_one_length(record: Struct, *fields: str) -> None:
    lengths = {name: _length(name, getattr(record, name)) for name in fields}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"per-token arrays differ in length: {told}")
    for name, expected in _DTYPES.items():
        array = getattr(record, name, None)
        if array is not None and array.dtype != expected:
            raise ValueError(f"{name}: has dtype {array.dtype}; it must be {expected}")


def _length(name: str, array: Any) -> int:
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise ValueError(f"{name}: must be a one-dimensional numpy array")
    return len(array)


_DTYPES = {
    "token_ids": np.dtype(np.int32),
    "response_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}

replace = structs.replace
