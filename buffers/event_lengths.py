"""The lengths of responses by outcome, summed from events, and the lines that `audit` prints.

Invariant: sampled = trained + dropped + waiting, as a ledger counts them, but without rounding and
without a ledger. What a learner's history lost and made again counts each time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from buffers.ledger.events import Event
from streamrl.types import DropReason, LengthHistogram, ResponseLengths, length_distance


class EventLengths:
    """Follows the events of each prompt, in their order."""

    def __init__(self) -> None:
        self._sampled: Counter[int] = Counter()
        self._trained: Counter[int] = Counter()
        self._dropped: defaultdict[DropReason, Counter[int]] = defaultdict(Counter)
        self._waiting: dict[int, tuple[int, ...]] = {}
        self._trained_last: set[int] = set()

    def add(self, event: Event) -> None:
        self._sampled.update(event.response_lengths)
        self._trained_last.discard(event.prompt_index)
        lengths = event.response_lengths or self._waiting.get(event.prompt_index, ())
        if not lengths:
            return
        match event.state:
            case "acknowledged":
                self._trained.update(lengths)
            case "dropped" if event.reason in list(DropReason):
                self._dropped[DropReason(event.reason)].update(lengths)
            case "trained":
                self._trained_last.add(event.prompt_index)
        if event.state in ("acknowledged", "dropped"):
            self._waiting.pop(event.prompt_index, None)
        else:
            self._waiting[event.prompt_index] = lengths

    def by_outcome(self) -> ResponseLengths:
        """What is trained and waits for its checkpoint counts as trained."""
        trained = self._trained.copy()
        for prompt_index in self._trained_last:
            trained.update(self._waiting[prompt_index])
        dropped = {why: LengthHistogram.of(counts) for why, counts in self._dropped.items()}
        return ResponseLengths(
            LengthHistogram.of(self._sampled), LengthHistogram.of(trained), dropped
        )


def length_findings(lengths: ResponseLengths) -> Iterator[str]:
    """Number, mean, 99th percentile and longest by outcome, in lines; none without a response.

    The distance is the Kolmogorov-Smirnov one, 0 for equal distributions and 1 at most.
    """
    sampled = lengths.sampled
    if not sampled.counts:
        return
    yield f"{sampled.num_responses} responses sampled: {_summary(sampled)}"
    if lengths.trained.counts:
        distance = length_distance(sampled, lengths.trained)
        summary = f"{_summary(lengths.trained)}; distance from sampled {distance:.3f}"
        yield f"  {lengths.trained.num_responses} trained: {summary}"
    for reason, dropped in sorted(lengths.dropped.items()):
        percent = 100 * dropped.num_tokens / max(1, sampled.num_tokens)
        summary = f"{_summary(dropped)}; {percent:.1f} % of the sampled tokens"
        yield f"  {dropped.num_responses} dropped ({reason}): {summary}"


def _summary(lengths: LengthHistogram) -> str:
    p99, longest = lengths.quantile(0.99), lengths.longest
    return f"{lengths.mean:.1f} tokens in the mean, 99th percentile {p99}, longest {longest}"
