"""Which experts of a mixture-of-experts model each token was given to.

A layer's router gives each token to the K experts that it scores highest. Engines report the choice
of every layer for each token that went through the model, that is, for all but the last.

Invariant: a token has the choice of all layers, or none. Layers without experts have zeros, as
vLLM and SGLang report them.
Shapes: T tokens, M of them with a record, L decoder layers, K experts of a token.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from streamrl.types.tokens import BoolArray, require_column

UNRECORDED = -1
"""Stands for the experts of a token without a record."""
_MOST_EXPERTS = 2**15

Size = Annotated[int, Meta(ge=1, le=2**12)]
IdBytes = Annotated[int, Meta(ge=1, le=2)]


class RoutedExperts(Struct, frozen=True, array_like=True):
    """`is_recorded` [T] says which tokens have a record; `data` are the ids [M, L, K] in row-major
    order, each of `id_bytes` little-endian bytes."""

    num_layers: Size
    top_k: Size
    id_bytes: IdBytes
    is_recorded: BoolArray
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        require_column("routed_experts.is_recorded", self.is_recorded, np.dtype(np.bool_))
        require_column("routed_experts.data", self.data, np.dtype(np.uint8))
        if len(self.data) != (expected := self.bytes_per_token * self.num_recorded):
            raise ValueError(
                f"routed_experts.data: has {len(self.data)} bytes; {self.num_recorded} tokens, "
                f"{self.num_layers} layers and {self.top_k} experts of each have {expected}"
            )

    def __len__(self) -> int:
        """T"""
        return len(self.is_recorded)

    @property
    def num_recorded(self) -> int:
        """M"""
        return int(np.count_nonzero(self.is_recorded))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's record, not counting its byte in `is_recorded`."""
        return self.num_layers * self.top_k * self.id_bytes

    @property
    def content(self) -> bytes:
        """Bytes that are equal for tokens with equal experts."""
        return self.is_recorded.tobytes() + self.rows.astype("<u2").tobytes()

    @property
    def rows(self) -> NDArray[np.unsignedinteger]:
        """[M, L, K] of the tokens that have a record."""
        return self.data.view(f"<u{self.id_bytes}").reshape(-1, self.num_layers, self.top_k)

    def experts(self) -> NDArray[np.int16]:
        """[T, L, K] ids, UNRECORDED for a token without a record."""
        experts = np.full((len(self), self.num_layers, self.top_k), UNRECORDED, np.int16)
        experts[self.is_recorded] = self.rows
        return experts

    def part(self, tokens: slice) -> "RoutedExperts":
        """The record of these tokens."""
        start, stop, _ = tokens.indices(len(self))
        first = int(np.count_nonzero(self.is_recorded[:start]))
        is_recorded = self.is_recorded[start:stop]
        last = first + int(np.count_nonzero(is_recorded))
        size = self.bytes_per_token
        return self._of(is_recorded, self.data[first * size : last * size])

    def select(self, is_kept: BoolArray) -> "RoutedExperts":
        """The record of the tokens for which [T] is true."""
        rows = self.rows[is_kept[self.is_recorded]]
        return self._of(self.is_recorded[is_kept], np.ascontiguousarray(rows).reshape(-1))

    def _of(self, is_recorded: BoolArray, ids: NDArray[np.unsignedinteger]) -> "RoutedExperts":
        data = ids.view(np.uint8)
        return RoutedExperts(self.num_layers, self.top_k, self.id_bytes, is_recorded, data)

    @classmethod
    def of(cls, experts: NDArray[np.integer], num_tokens: int | None = None) -> "RoutedExperts":
        """A record of the first tokens from their experts [M, L, K]; the others of `num_tokens`
        have none.

        Raises:
            ValueError: they are not of that form, or more than there are tokens.
        """
        if experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer):
            raise ValueError(
                f"routed_experts: is an array of {experts.dtype} with {experts.ndim} dimensions; "
                "it must hold integers of tokens, layers and experts"
            )
        num_recorded, num_layers, top_k = experts.shape
        length = num_recorded if num_tokens is None else num_tokens
        if num_recorded > length:
            raise ValueError(f"routed_experts: are of {num_recorded} tokens; there are {length}")
        lowest, highest = int(experts.min(initial=0)), int(experts.max(initial=0))
        if lowest < 0 or highest >= _MOST_EXPERTS:
            raise ValueError(
                f"routed_experts: are of {lowest} to {highest}; an id is from 0 to "
                f"{_MOST_EXPERTS - 1}"
            )
        id_bytes = 1 if highest < 2**8 else 2
        data = np.ascontiguousarray(experts, f"<u{id_bytes}").reshape(-1).view(np.uint8)
        return cls(num_layers, top_k, id_bytes, np.arange(length) < num_recorded, data)

    @classmethod
    def joined(
        cls, parts: Sequence["RoutedExperts | None"], lengths: Sequence[int]
    ) -> "RoutedExperts | None":
        """The parts' records end to end; tokens of a part [length] without a record have none. None
        if no part has one.

        Raises:
            ValueError: the parts are of models of different shapes.
        """
        given = [part for part in parts if part is not None]
        if not given:
            return None
        shapes = {(part.num_layers, part.top_k) for part in given}
        if len(shapes) > 1:
            listed = " and ".join(f"{layers} layers x {k}" for layers, k in sorted(shapes))
            raise ValueError(f"routed_experts: are of {listed} experts; a model has one form")
        id_bytes = max(part.id_bytes for part in given)
        pairs = zip(parts, lengths, strict=True)
        recorded = [np.zeros(n, np.bool_) if p is None else p.is_recorded for p, n in pairs]
        rows = [part.rows.astype(f"<u{id_bytes}", copy=False) for part in given]
        data = np.concatenate(rows).reshape(-1).view(np.uint8)
        return cls(*shapes.pop(), id_bytes, np.concatenate(recorded), data)

    @classmethod
    def continued(
        cls, earlier: "RoutedExperts | None", new: "RoutedExperts | None", num_tokens: int
    ) -> "RoutedExperts | None":
        """The record of `num_tokens` tokens, the first of which have the record `earlier`, given a
        `new` record of all.

        A token keeps what was recorded when it was read or sampled, since its log-probability comes
        from that pass. Tokens without a record yet, such as the last of the previous turn and a
        tool's answer, get it from the pass that read them.
        """
        if earlier is None:
            return new
        rest = num_tokens - len(earlier)
        if new is None:
            return cls.joined([earlier, None], [len(earlier), rest])
        is_news = ~np.append(earlier.is_recorded, np.zeros(rest, np.bool_))
        added = new.select(is_news & new.is_recorded)
        both = cls.joined([earlier, added], [len(earlier), len(added)])
        assert both is not None, "both are there"
        # In the order of their tokens.
        places = np.append(
            np.flatnonzero(earlier.is_recorded), np.flatnonzero(is_news & new.is_recorded)
        )
        rows = np.ascontiguousarray(both.rows[places.argsort()]).reshape(-1).view(np.uint8)
        is_recorded = ~is_news | new.is_recorded
        return cls(both.num_layers, both.top_k, both.id_bytes, is_recorded, rows)
