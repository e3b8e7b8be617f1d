"""Sets of token ids that accompany tokens, and the checks of tokens, the same for one trajectory
and for a whole group. Each check raises ValueError with the field, its value and what is allowed.

Invariant: `counts` add up to the number of ids. A token without a record has an empty set.
Shapes: N tokens, M ids of all sets.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.types.media import check_media

if TYPE_CHECKING:
    from streamrl.types.packed import GroupFacts, PackedGroup
    from streamrl.types.rollouts import Completion, Trajectory, TrajectoryGroup

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def check_group(
    group: "TrajectoryGroup | PackedGroup", members: "Sequence[Trajectory] | Sequence[GroupFacts]"
) -> None:
    """Check a group, apart from its tokens."""
    if not members:
        raise ValueError("trajectories: is empty; a group holds at least one")
    if group.prompt_index < 0:
        raise ValueError(f"prompt: is {group.prompt_index}; it must be >= 0")
    indices = group.episode_indices
    steps = {after - before for before, after in itertools.pairwise((0, *indices))}
    if indices and (len(indices) != len(members) or indices[0] != 0 or not steps <= {0, 1}):
        raise ValueError(
            f"episode_indices: is {indices}; each of the {len(members)} trajectories must have "
            "one, in order and without a gap, from 0"
        )
    check_media([member.media for member in members], group.media)
    if (prompt := group.teacher_prompt) is not None:
        require_column("teacher_prompt", prompt, np.dtype(np.int32))
        if not prompt.size or np.minimum.reduce(prompt) < 0:
            raise ValueError("teacher_prompt: is empty or has a negative id")


def check_tokens(record: "Trajectory | PackedGroup") -> None:
    """Check every token in the arrays of one trajectory or of a whole group."""
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
    if record.teacher_logprobs is not None:
        require_one_length(record, "token_ids", "teacher_logprobs")
        if not _is_finite(record.teacher_logprobs):
            raise ValueError("teacher_logprobs: has NaN or infinite values")
        if np.count_nonzero((record.teacher_logprobs != 0) > mask):
            raise ValueError("teacher_logprobs: must be 0 where response_mask is off")
    if record.token_ids.size and np.minimum.reduce(record.token_ids) < 0:
        raise ValueError("token_ids: has a negative id")
    check_token_sets(record, mask)
    num_tokens, experts = len(record.token_ids), record.routed_experts
    if experts is not None and len(experts) != num_tokens:
        raise ValueError(f"routed_experts: are of {len(experts)} tokens; there are {num_tokens}")


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
    for name in fields:
        require_column(name, getattr(record, name), _DTYPES[name])
    lengths = {name: len(getattr(record, name)) for name in fields}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"per-token arrays differ in length: {listed}")


_DTYPES: dict[str, np.dtype[Any]] = {
    "counts": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "response_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "logprobs": np.dtype(np.float32),
    "loss_mask": np.dtype(np.bool_),
    "teacher_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}


class TokenSets(Struct, frozen=True, array_like=True):
    """`counts` [N] are the sizes of the sets, `token_ids` [M] their members, end to end."""

    counts: Int32Array
    token_ids: Int32Array

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            require_column(name, getattr(self, name), _DTYPES[name])
        if self.counts.size and np.minimum.reduce(self.counts) < 0:
            raise ValueError("counts: has a negative number")
        num_ids = int(self.counts.sum(dtype=np.int64))
        if any(len(getattr(self, name)) != num_ids for name in self.__struct_fields__[1:]):
            raise ValueError(f"counts: add up to {num_ids}; there are {len(self.token_ids)} ids")
        if num_ids and np.minimum.reduce(self.token_ids) < 0:
            raise ValueError("token_ids: has a negative id")

    def __len__(self) -> int:
        """N"""
        return len(self.counts)

    @property
    def owners(self) -> NDArray[np.int64]:
        """[M] the token whose set each id belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def part(self: "Sets", tokens: slice) -> "Sets":
        """The sets of these tokens."""
        first = int(self.counts[: tokens.start].sum(dtype=np.int64))
        counts = self.counts[tokens]
        ids = slice(first, first + int(counts.sum(dtype=np.int64)))
        columns = (getattr(self, name)[ids] for name in self.__struct_fields__[1:])
        return type(self)(counts, *columns)

    @classmethod
    def joined(
        cls: "type[Sets]", parts: Sequence["Sets | None"], lengths: Sequence[int]
    ) -> "Sets | None":
        """The parts' sets end to end; empty ones for a part [length] without a record. None if no
        part has one."""
        if all(part is None for part in parts):
            return None
        pairs = zip(parts, lengths, strict=True)
        given = [cls.empty(length) if part is None else part for part, length in pairs]
        names = cls.__struct_fields__
        return cls(*(np.concatenate([getattr(sets, name) for sets in given]) for name in names))

    @classmethod
    def empty(cls: "type[Sets]", length: int) -> "Sets":
        nothing = (np.zeros(0, _DTYPES[name]) for name in cls.__struct_fields__[1:])
        return cls(np.zeros(length, np.int32), *nothing)

    @classmethod
    def of(
        cls: "type[Sets]", sets: Sequence[NDArray[Any]], *columns: Sequence[NDArray[Any]]
    ) -> "Sets":
        """Made of N arrays of ids, and N arrays of values for each further field."""
        counts = np.array([len(ids) for ids in sets], np.int32)
        fields = zip(cls.__struct_fields__[1:], (sets, *columns), strict=True)
        return cls(counts, *(_end_to_end(parts, _DTYPES[name]) for name, parts in fields))


class TopLogprobs(TokenSets, frozen=True, array_like=True):
    """The likeliest candidates of each token, and `logprobs` [M] (nats), those of the distribution
    that it was sampled from."""

    logprobs: Float32Array

    def __post_init__(self) -> None:
        super().__post_init__()
        if not np.isfinite(self.logprobs).all():
            raise ValueError("logprobs: has NaN or infinite values")


Sets = TypeVar("Sets", bound=TokenSets)


SETS = ("sampling_mask", "top_logprobs", "teacher_top_logprobs")
"""The fields of a trajectory that are token sets; a completion has no teacher's."""


def check_token_sets(
    record: "Trajectory | PackedGroup | Completion", response_mask: BoolArray | None = None
) -> None:
    """Check the sets that accompany tokens; without `response_mask` every token is a response
    token.

    Raises:
        ValueError: one set too many or too few, a set of a token that was not sampled, or a token
            that is not in the set that it was sampled among.
    """
    for name in SETS:
        sets = getattr(record, name, None)
        if sets is None:
            continue
        if len(sets) != len(record.token_ids):
            raise ValueError(f"{name}: has {len(sets)} sets for {len(record.token_ids)} tokens")
        if response_mask is not None and np.count_nonzero((sets.counts > 0) > response_mask):
            raise ValueError(f"{name}: must be empty where response_mask is off")
    if (mask := record.sampling_mask) is not None:
        owners = mask.owners
        is_sampled = mask.token_ids == record.token_ids[owners]
        num_found = np.bincount(owners[is_sampled], minlength=len(mask))
        if np.count_nonzero(num_found != (mask.counts > 0)):
            raise ValueError("sampling_mask: a sampled token must be in its own set once")


def _end_to_end(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def require_column(name: str, array: Any, dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
        found = f"is a {type(array).__name__}"
        if isinstance(array, np.ndarray):
            found = f"has dtype {array.dtype} and shape {array.shape}"
        raise ValueError(f"{name}: {found}; it must be a one-dimensional numpy array of {dtype}")
