"""Finds the places of a conversation's media among its token ids.

A chat template writes one placeholder token for each medium; a model reads as many as the medium
has tokens. Recorded token ids are those that the model reads.

Invariant: a medium's place depends only on the token ids and the media before it. A policy may also
sample placeholder tokens; a run of them that fits no medium is text.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamrl.errors import RolloutError
from streamrl.types.media import MediaKind


class Size(NamedTuple):
    """A medium as token ids see it."""

    kind: MediaKind
    num_tokens: int


class MediaPlace(NamedTuple):
    """The tokens of one medium: `start`, `start` + 1, ..., `stop` - 1."""

    kind: MediaKind
    start: int
    stop: int


@dataclass(frozen=True)
class Placeholders:
    """The placeholder tokens of a model."""

    image: int
    video: int

    @classmethod
    def of(cls, config: Any) -> "Placeholders":
        return cls(config.image_token_id, config.video_token_id)

    def expand(
        self, token_ids: Sequence[int], sizes: Sequence[Size], place: str
    ) -> tuple[int, ...]:
        """Expand the token ids of a rendered template to those that the model reads.

        Raises:
            RolloutError: placeholders and media do not match; the message begins with `place`.
        """
        kinds = [kind for token in token_ids if (kind := self._kind(token))]
        if kinds != [size.kind for size in sizes]:
            raise RolloutError(
                f"{place}: the chat template wrote {len(kinds)} placeholders for "
                f"{len(sizes)} images and videos; a text must not contain a placeholder token"
            )
        counts = iter(sizes)
        repeated = (
            itertools.repeat(token, next(counts).num_tokens) if self._kind(token) else (token,)
            for token in token_ids
        )
        return tuple(itertools.chain.from_iterable(repeated))

    def find(self, token_ids: Sequence[int], sizes: Sequence[Size]) -> tuple[MediaPlace, ...]:
        """Find the place of each medium, in order: the first run of placeholders that fits it.

        Raises:
            RolloutError: a medium has no place.
        """
        runs = self._runs(token_ids)
        return tuple(_next_fitting(runs, size) for size in sizes)

    def collapse(self, token_ids: Sequence[int], sizes: Sequence[Size]) -> list[int]:
        """Reduce token ids that a model reads to one placeholder for each medium."""
        repeated = {
            position
            for place in self.find(token_ids, sizes)
            for position in range(place.start + 1, place.stop)
        }
        return [token for i, token in enumerate(token_ids) if i not in repeated]

    def _kind(self, token: int) -> MediaKind | None:
        if token == self.image:
            return "image"
        return "video" if token == self.video else None

    def _runs(self, token_ids: Sequence[int]) -> Iterator[MediaPlace]:
        start = 0
        for kind, run in itertools.groupby(token_ids, self._kind):
            stop = start + sum(1 for _ in run)
            if kind is not None:
                yield MediaPlace(kind, start, stop)
            start = stop


def _next_fitting(runs: Iterator[MediaPlace], size: Size) -> MediaPlace:
    for place in runs:
        if (place.kind, place.stop - place.start) == size:
            return place
    raise RolloutError(
        f"the token ids have no place for {size.num_tokens} tokens of an {size.kind}: they are "
        "those of another conversation, or were cut"
    )
