"""One transition of one lease, as a backend keeps it for an audit.

Invariant: the events of a prompt are in the order in which they happened; replayed, they give its
present column. `buffered` after `taken` or `trained` is a group that was given back when a learner
attached. `lease_id` is empty where a learner's books decided instead of a lease: "dropped"
(orphaned) then means that the prompt is free again, whatever its earlier events are;
"acknowledged" that a checkpoint contains it, and all prompts before it that have no event yet.
"""

from msgspec import Struct

BY_BOOKS = "books"
"""The reason of an "acknowledged" that a learner's books decided, not a training here."""


class Event(Struct, frozen=True):
    """`state`: leased, buffered, taken, trained, acknowledged, dropped (then with its `reason`).

    "acknowledged" has the reason BY_BOOKS where the group was not trained here. The transition
    that a put causes, to buffered or dropped, has the `response_lengths` of the group; others ().
    """

    prompt_index: int
    state: str
    reason: str | None
    lease_id: str
    response_lengths: tuple[int, ...] = ()
