"""One transition of one lease: what a backend's history tells an audit.

Invariant: the events of a prompt are in the order in which they happened, so that replayed they
give the column it is in now; `buffered` after `taken` or `trained` is a group given back to a
learner that came back. `lease_id` is empty where a learner's books, not a lease, decided: "dropped"
(orphaned) means that the prompt is free again, whatever became of it before; "acknowledged" that
a checkpoint holds it.
"""

from msgspec import Struct

BY_BOOKS = "books"
"""The reason of an "acknowledged" that a learner's books, not a training here, decided."""


class Event(Struct, frozen=True):
    """`state`: leased, buffered, taken, trained, acknowledged, dropped (then with its `reason`).

    "acknowledged" has the reason BY_BOOKS where a learner's books ended what was not trained here.
    """

    prompt_index: int
    state: str
    reason: str | None
    lease_id: str
