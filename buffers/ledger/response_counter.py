"""The lengths of responses by outcome, as `Entries` counts them while groups change their state.

Invariant: sampled = trained + dropped + those of the groups that the ledger holds and that are not
trained. Lengths are rounded, so the counts stay few however many responses there are.
"""

from collections.abc import Sequence

from streamrl.types import DropReason, LengthHistogram, ResponseLengths, rounded_length


class ResponseCounter:
    """Counts since the buffer's first start; a journal restores them."""

    def __init__(self) -> None:
        self.restore(ResponseLengths())

    def restore(self, lengths: ResponseLengths) -> None:
        """Continue from these counts."""
        self._sampled = _Outcome(lengths.sampled)
        self._trained = _Outcome(lengths.trained)
        self._dropped = {reason: _Outcome(counted) for reason, counted in lengths.dropped.items()}

    def put(self, lengths: Sequence[int]) -> None:
        self._sampled.add(lengths)

    def train(self, lengths: Sequence[int]) -> None:
        self._trained.add(lengths)

    def give_back(self, lengths: Sequence[int]) -> None:
        """They were trained after the version that a learner attached with."""
        self._trained.remove(lengths)

    def drop(self, lengths: Sequence[int], reason: DropReason) -> None:
        if lengths:
            self._dropped.setdefault(reason, _Outcome(LengthHistogram())).add(lengths)

    def frozen(self) -> ResponseLengths:
        dropped = {reason: outcome.frozen() for reason, outcome in self._dropped.items()}
        return ResponseLengths(self._sampled.frozen(), self._trained.frozen(), dropped)


class _Outcome:
    def __init__(self, known: LengthHistogram) -> None:
        self._counts = dict(known.counts)
        self._num_tokens = known.num_tokens

    def add(self, lengths: Sequence[int]) -> None:
        counts = self._counts
        for length in map(rounded_length, lengths):
            counts[length] = counts.get(length, 0) + 1
        self._num_tokens += sum(lengths)

    def remove(self, lengths: Sequence[int]) -> None:
        """`lengths` were added before."""
        removed = LengthHistogram.of(lengths).rounded()
        left = LengthHistogram(self._counts, self._num_tokens) - removed
        self._counts, self._num_tokens = left.counts, left.num_tokens

    def frozen(self) -> LengthHistogram:
        return LengthHistogram({**self._counts}, self._num_tokens)
