"""A micro-batch: the trajectories of one forward pass, as one packed row of tokens.

Trajectories follow one another without padding.

`SharedPrompts`: a prompt that several trajectories of a micro-batch begin with is computed once. If
only attention connects tokens, a token's states depend on the tokens up to it and nothing else, so
trajectories that begin alike have the same states there. Tokens after the last one that predicts a
response token are left out, too.

Invariant: log-probabilities and gradients are those of the micro-batch without sharing, up to the
order of sums. A trajectory with non-finite numbers may pass them to those that begin like it.
Shapes: N tokens of the micro-batch (prompts included), n of them computed, S trajectories, B of
them in a bucket, L the longest of a bucket, R response tokens, M candidates of these, O tokens that
were observed between them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.sequences import Sequences, to_device
from streamrl.types import Media, RoutedExperts


def rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[*I, ...] from [N, ...] for indices [*I], which are on the tensor's device. The gradient of a
    row is always summed in the same order."""
    if tensor.is_cuda:
        # There the gradient of `index_select` is summed in the order in which threads arrive.
        return tensor[indices]
    # Several times as fast as indexing, which on a CPU copies number by number.
    chosen = tensor.flatten(1).index_select(0, indices.flatten())
    return chosen.view(*indices.shape, *tensor.shape[1:])


Buckets: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Rows of tokens that share a call: indices [B, L], padded with the trajectory's last one, and the
flat ones in [B * L] that are no padding."""
NARROWEST = 16
"""Columns of such rows, at least: a CPU's softmax takes fewer numbers than fill a register one by
one."""


def offsets_within(lengths: torch.Tensor) -> torch.Tensor:
    """[S] -> [sum of the lengths]: 0, 1, ... within each stretch of the given lengths."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where trajectories end: the lengths of consecutive stretches of the N tokens, or of
    `places`."""

    lengths: tuple[int, ...]
    device: torch.device
    places: torch.Tensor | None = None
    """[sum of the lengths] on the CPU, which of the N tokens stands there; each stands
    somewhere."""

    @property
    def num_tokens(self) -> int:
        """N"""
        return sum(self.lengths) if self.places is None else 1 + int(self.places.max())

    @cached_property
    def ends(self) -> torch.Tensor:
        """[S + 1] int32 cumulative lengths, as variable-length kernels want them."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        return to_device(lengths.cumsum(0, dtype=torch.int32), self.device)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] position of each token in its trajectory."""
        offsets = to_device(offsets_within(torch.tensor(self.lengths)), self.device)
        return offsets if self.places is None else offsets[self.first]

    @cached_property
    def repeated(self) -> torch.Tensor:
        """`places` on the device."""
        assert self.places is not None, "only then a token is in several stretches"
        return to_device(self.places, self.device)

    @cached_property
    def first(self) -> torch.Tensor:
        """[N] the first index of each token in `places`."""
        return self._first_of(self.repeated)

    @cached_property
    def trajectory_indices(self) -> torch.Tensor:
        """[N] int32, which trajectory each token belongs to."""
        lengths = torch.tensor(self.lengths)
        indices = torch.arange(len(lengths), dtype=torch.int32)
        return to_device(indices.repeat_interleave(lengths), self.device)

    @cached_property
    def buckets(self) -> Buckets:
        """Trajectories grouped by length, within a factor of two, shortest first."""
        return self._rows(lambda n: (max(n, NARROWEST) - 1).bit_length(), NARROWEST)

    @cached_property
    def unpadded_buckets(self) -> Buckets:
        """Trajectories grouped by equal length."""
        return self._rows(lambda n: n)

    @cached_property
    def order(self) -> torch.Tensor:
        """[N] index of each token in the concatenated rows of `buckets`."""
        return self._first_of(torch.cat([indices.flatten() for indices, _ in self.buckets]))

    def _rows(self, key: Callable[[int], int], width: int = 0) -> Buckets:
        """Trajectories whose lengths have equal keys; at least `width` columns."""
        starts = tuple(accumulate(self.lengths, initial=0))
        members: dict[int, list[int]] = {}
        for i, length in enumerate(self.lengths):
            members.setdefault(key(length), []).append(i)
        buckets = []
        for of_bucket in members.values():
            lengths = torch.tensor([self.lengths[i] for i in of_bucket])
            offsets = torch.arange(max(int(lengths.max()), width))
            inside = offsets < lengths[:, None]
            clipped = torch.minimum(offsets, lengths[:, None] - 1)
            indices = torch.tensor([starts[i] for i in of_bucket])[:, None] + clipped
            if self.places is not None:
                indices = self.places[indices]
            real = inside.flatten().nonzero()[:, 0]
            buckets.append((to_device(indices, self.device), to_device(real, self.device)))
        return tuple(buckets)

    def _first_of(self, token_of: torch.Tensor) -> torch.Tensor:
        """[N] where each token first is in [M], which has all of them."""
        places = torch.arange(len(token_of), device=self.device)
        first = places.new_full((self.num_tokens,), len(token_of))
        return first.scatter_reduce(0, token_of, places, "amin")


MOST = 0.9
"""Share of tokens left above which sharing prompts is not worth it."""


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The tokens to compute of a micro-batch whose trajectories begin alike."""

    tokens: torch.Tensor
    """[n] which of the N tokens."""
    predictors: torch.Tensor
    """[R] positions among the n whose hidden states predict the response tokens."""
    packing: Packing
    """Of the trajectories, cut after their last predictor."""

    @classmethod
    def of(
        cls,
        token_ids: NDArray[np.integer],
        lengths: Sequence[int],
        prompts: Sequence[int],
        predictors: NDArray[np.int64],
        device: torch.device,
        routed_experts: RoutedExperts | None = None,
        *,
        most: float = MOST,
    ) -> "SharedPrompts | None":
        """None if more than the share `most` of the tokens would be left.

        Args:
            lengths: [S] tokens of each trajectory, `token_ids` [N] being those of all.
            prompts: [S] tokens of its prompt, which others may share.
            predictors: [R] positions in N, rising.
            routed_experts: [N] these must be equal, too.
        """
        sizes = np.array(lengths, np.int64)
        ends = sizes.cumsum()
        starts = ends - sizes
        # For a trajectory without any, the token before its first, if there is one.
        last = np.append(predictors, -1)[np.searchsorted(predictors, ends) - 1]
        needed = np.maximum(last + 1 - starts, 1)
        common = np.minimum(prompts, needed)
        bounds = zip(starts.tolist(), common.tolist(), strict=True)
        stretches = [slice(start, start + length) for start, length in bounds]
        leaders = leaders_of(beginning(token_ids, routed_experts, part) for part in stretches)
        row = np.arange(len(needed)).repeat(needed)
        offset = np.arange(len(row)) - (needed.cumsum() - needed).repeat(needed)
        is_own = (leaders[row] == row) | (offset >= common[row])
        if is_own.sum() > most * len(row):
            return None
        # A row's own tokens have consecutive places; its prompt has its leader's.
        own = is_own.cumsum() - 1
        first = own[needed.cumsum() - needed]
        places = np.where(is_own, own, first[leaders[row]] + offset)
        place_of = np.zeros(len(token_ids), np.int64)
        place_of[starts[row] + offset] = places
        return cls(
            tokens=to_device(torch.from_numpy((starts[row] + offset)[is_own]), device),
            predictors=to_device(torch.from_numpy(place_of[predictors]), device),
            packing=Packing(tuple(needed.tolist()), device, torch.from_numpy(places)),
        )


def beginning(
    token_ids: NDArray[np.integer], routed_experts: RoutedExperts | None, tokens: slice
) -> bytes:
    """Equal for tokens that have equal states."""
    ids = token_ids[tokens].tobytes()
    return ids if routed_experts is None else ids + routed_experts.part(tokens).content


def leaders_of(beginnings: Iterable[bytes]) -> NDArray[np.int64]:
    """[S] the first trajectory with the same beginning."""
    found: dict[bytes, int] = {}
    leaders = [found.setdefault(content, i) for i, content in enumerate(beginnings)]
    return np.array(leaders, np.int64)


@dataclass(frozen=True, eq=False)
class Observed:
    """What the policy read between its turns: unsampled tokens between the first and last sampled
    one."""

    predictors: torch.Tensor
    """[O] positions in N of the tokens before them, rising."""
    targets: torch.Tensor
    """[O] int64"""
    sequences: Sequences
    """The observed tokens of each trajectory."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass: N tokens, of some of the batch's trajectories."""

    token_ids: torch.Tensor
    """[1, N] int64"""
    packing: Packing
    predictors: torch.Tensor
    """[R] positions in N whose hidden states predict the response tokens."""
    targets: torch.Tensor
    """[R] int64, the response tokens."""
    members: torch.Tensor
    """[S] indices of these trajectories in the batch."""
    responses: torch.Tensor
    """[R] indices of these response tokens in the batch."""
    sequences: Sequences
    prompt_indices: tuple[int, ...]
    """[S] places in the prompt stream."""
    media: tuple[tuple[Media, ...], ...]
    """The media of each stretch of `packing`, in the order of their places."""
    sampling_mask: Candidates | None = None
    """The candidates each response token was sampled among; none means the whole vocabulary."""
    top_candidates: Candidates | None = None
    """The likeliest alternatives to each response token under the behavior policy."""
    routed_experts: RoutedExperts | None = None
    """[N] the experts that the engine used; None if it recorded none."""

    shared_prompts: SharedPrompts | None = None
    """What to compute if trajectories begin alike; None if nearly everything."""
    cut_again: "Callable[[Sequence[int]], MicroBatch] | None" = None
    """(some of `members`) -> the micro-batch of these alone; None if it was made without a
    batch."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no trajectory, and only accompanies another rank's micro-batch."""
        return not len(self.members)

    @cached_property
    def observed(self) -> Observed:
        """Only of trajectories without media, since an image placeholder is not a token to
        predict."""
        is_response = torch.zeros_like(self.token_ids[0], dtype=torch.bool)
        is_response[self.predictors + 1] = True
        owners = self.packing.trajectory_indices.long()
        counts = is_response.new_zeros(len(self.packing.lengths), dtype=torch.int64)
        counts.index_add_(0, owners, is_response.long())
        ends, sampled = counts.cumsum(0), is_response.cumsum(0)
        is_between = (sampled > (ends - counts)[owners]) & (sampled < ends[owners])
        has_media = torch.tensor([bool(media) for media in self.media], device=owners.device)
        positions = (is_between & ~is_response & ~has_media[owners]).nonzero()[:, 0]
        lengths = owners[positions].bincount(minlength=len(counts))
        return Observed(
            predictors=positions - 1,
            targets=self.token_ids[0, positions],
            sequences=Sequences.from_lengths(lengths.cpu()[: len(self.members)]),
        )

    def select(self, is_kept: torch.Tensor) -> "MicroBatch":
        """The trajectories for which [S] bool, on the CPU, is true; itself if all are."""
        if is_kept.all():
            return self
        assert self.cut_again is not None, "it was cut from a batch"
        return self.cut_again(self.members[is_kept].tolist())
