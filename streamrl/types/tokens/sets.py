"""For each of N tokens a set of token ids of any size, end to end: what a token was sampled among,
and the likeliest candidates with their log-probabilities.

Invariant: `counts` add up to the ids there are. A token without a record has an empty set.
Shapes: N tokens, M ids of all sets.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.types.tokens.checks import BoolArray, Float32Array, Int32Array


class TokenSets(Struct, frozen=True, array_like=True):
    """`counts` [N] are the sizes of the sets, `token_ids` [M] their members."""

    counts: Int32Array
    token_ids: Int32Array

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _require_column(name, getattr(self, name), _DTYPES[name])
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
        """[M] the token whose set an id is in."""
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
        """The sets of these parts end to end; empty ones for a part [length] without a record;
        None if no part has one."""
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
        """Of N arrays of ids, and for each further field as many arrays of its values."""
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


class HasTokenSets(Protocol):
    """A trajectory, a group packed, or a completion."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def sampling_mask(self) -> TokenSets | None: ...
    @property
    def top_logprobs(self) -> TopLogprobs | None: ...


def check_token_sets(record: HasTokenSets, response_mask: BoolArray | None = None) -> None:
    """The rules of the sets beside tokens; every token is a response without `response_mask`.

    Raises:
        ValueError: one set too many or too few, a set of a token that was not sampled, or a token
            that is not in the set that it was sampled among.
    """
    for name in ("sampling_mask", "top_logprobs"):
        sets = getattr(record, name)
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


def _require_column(name: str, array: Any, dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
        raise ValueError(f"{name}: must be a one-dimensional numpy array of {dtype}")


_DTYPES: dict[str, np.dtype[Any]] = {
    "counts": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
}
