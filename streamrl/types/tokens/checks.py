"""Checks of the records of tokens, the same for one trajectory and for a whole group.

Each check raises ValueError with the field, what it is and what it must be.
"""

import itertools
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class TokenRecord(Protocol):
    """Arrays [T] of the tokens of one trajectory, or of several end to end."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def response_mask(self) -> BoolArray: ...
    @property
    def behavior_logprobs(self) -> Float32Array: ...
    @property
    def policy_versions(self) -> Int32Array: ...
    @property
    def loss_mask(self) -> BoolArray | None: ...


def check_group(
    members: tuple[object, ...], prompt_index: int, episode_indices: tuple[int, ...]
) -> None:
    if not members:
        raise ValueError("trajectories: is empty; a group holds at least one")
    if prompt_index < 0:
        raise ValueError(f"prompt: is {prompt_index}; it must be >= 0")
    if episode_indices:
        _check_episodes(episode_indices, len(members))


def _check_episodes(indices: tuple[int, ...], num_members: int) -> None:
    steps = {after - before for before, after in itertools.pairwise(indices)}
    if len(indices) != num_members or indices[0] != 0 or not steps <= {0, 1}:
        raise ValueError(
            f"episode_indices: is {indices}; each of the {num_members} trajectories must have one, "
            "in order and without a gap, from 0"
        )


def check_tokens(record: TokenRecord) -> None:
    """The rules of each token, in the arrays of one trajectory or of a whole group."""
    require_one_length(record, "token_ids", "response_mask", "behavior_logprobs", "policy_versions")
    mask, logprobs = record.response_mask, record.behavior_logprobs
    if not _is_finite(logprobs):
        raise ValueError("behavior_logprobs: has NaN or infinite values")
    # count_nonzero, since a buffer checks every group and `any` costs it twice as much.
    if np.count_nonzero((logprobs != 0) > mask):
        raise ValueError("behavior_logprobs: must be 0 where response_mask is off")
    if np.count_nonzero((record.policy_versions >= 0) != mask):
        raise ValueError("policy_versions: must be >= 0 where response_mask is on, else -1")
    if record.loss_mask is not None:
        require_one_length(record, "token_ids", "loss_mask")
        if np.count_nonzero(record.loss_mask > mask):
            raise ValueError("loss_mask: must be off where response_mask is off")
    if record.token_ids.size and np.minimum.reduce(record.token_ids) < 0:
        raise ValueError("token_ids: has a negative id")


def check_reward(reward: float) -> None:
    if not math.isfinite(reward):
        raise ValueError(f"reward: is {reward}; it must be finite")


def oldest_version(policy_versions: Int32Array) -> int | None:
    # Read as unsigned, the -1 of every other token is larger than any version.
    oldest = int(np.minimum.reduce(policy_versions.view(np.uint32)))
    return oldest if oldest < 2**31 else None


def newest_version(policy_versions: Int32Array) -> int | None:
    # Other tokens have -1.
    newest = int(np.maximum.reduce(policy_versions, initial=-1))
    return newest if newest >= 0 else None


def _is_finite(values: Float32Array) -> bool:
    """One pass if all are finite; a second one if not, since a sum of squares may overflow."""
    return bool(math.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def require_one_length(record: object, *fields: str) -> None:
    arrays = [(getattr(record, name), _DTYPES[name]) for name in fields]
    shape = getattr(arrays[0][0], "shape", ())
    if len(shape) == 1 and all(
        type(array) is np.ndarray and array.shape == shape and array.dtype == dtype
        for array, dtype in arrays
    ):
        return
    _raise_unlike(record, *fields)


def _raise_unlike(record: object, *fields: str) -> None:
    lengths = {name: _length(name, getattr(record, name)) for name in fields}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"per-token arrays differ in length: {listed}")
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
    "loss_mask": np.dtype(np.bool_),
    "policy_versions": np.dtype(np.int32),
}
