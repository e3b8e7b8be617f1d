"""What is sampled: completions, trajectories, groups of them, and a group's header.

Shapes: T tokens of a trajectory, N tokens of a completion. Log-probabilities are in nats.
"""

import math
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a completion, and with it a trajectory, ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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
        mask, logprobs = self.response_mask, self.behavior_logprobs
        if not _is_finite(logprobs):
            raise ValueError("behavior_logprobs: has NaN or infinite values")
        # count_nonzero, since a buffer checks each trajectory and `any` costs it twice as much.
        if np.count_nonzero(logprobs[~mask]):
            raise ValueError("behavior_logprobs: must be 0 where response_mask is off")
        if np.count_nonzero((self.policy_versions >= 0) != mask):
            raise ValueError("policy_versions: must be >= 0 where response_mask is on, else -1")
        if np.minimum.reduce(self.token_ids) < 0:
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
        # Read as unsigned, the -1 of every other token is larger than any version.
        oldest = int(np.minimum.reduce(self.policy_versions.view(np.uint32)))
        return oldest if oldest < 2**31 else None


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


def _is_finite(values: Float32Array) -> bool:
    """One pass where all is well; a sum of squares may also overflow, so that is looked at."""
    return bool(math.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def _require_one_length(record: Struct, *fields: str) -> None:
    arrays = [(getattr(record, name), _DTYPES[name]) for name in fields]
    shape = getattr(arrays[0][0], "shape", ())
    if len(shape) == 1 and all(
        type(array) is np.ndarray and array.shape == shape and array.dtype == dtype
        for array, dtype in arrays
    ):
        return
    _raise_unlike(record, *fields)


def _raise_unlike(record: Struct, *fields: str) -> None:
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
