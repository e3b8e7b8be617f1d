"""How many leases of a prompt ended without a group, so that a prompt that never gets one is seen.

Such a prompt is granted again each time. One that ends the process of each generator has no other
trace. Leases that a learner's books end are not counted.

Invariant: only open prompts without a group are counted: a count is forgotten once the prompt has a
group or ends.
"""

import heapq
from collections import Counter

from buffers.ledger.events import Event
from streamrl.types import MAX_RETRIED, MIN_RETRIED_LEASES, DropReason, RetriedPrompt

_RETURNS_PROMPT = frozenset(reason for reason in DropReason if reason.returns_prompt)
_ENDS = ("buffered", "acknowledged", "dropped")


def ends_without_group(event: Event) -> bool:
    """Whether a lease ends here and its prompt is granted again."""
    return bool(event.lease_id) and event.state == "dropped" and event.reason in _RETURNS_PROMPT


class RetryCounter:
    """The counts of one ledger, from its events."""

    def __init__(self) -> None:
        self._num_leases: Counter[int] = Counter()

    def on_event(self, event: Event) -> None:
        if ends_without_group(event):
            self._num_leases[event.prompt_index] += 1
        elif event.state in _ENDS and event.reason not in _RETURNS_PROMPT:
            self._num_leases.pop(event.prompt_index, None)

    def retried(self) -> tuple[RetriedPrompt, ...]:
        """See `BufferStats.retried`; of as many leases, the later prompt first."""
        return most_retried(self._num_leases)


def most_retried(num_leases: Counter[int]) -> tuple[RetriedPrompt, ...]:
    """Of these leases that ended without a group, by prompt."""
    counts = ((count, prompt_index) for prompt_index, count in num_leases.items())
    repeated = (count for count in counts if count[0] >= MIN_RETRIED_LEASES)
    return tuple(
        RetriedPrompt(prompt_index=prompt_index, num_leases=count)
        for count, prompt_index in heapq.nlargest(MAX_RETRIED, repeated)
    )
