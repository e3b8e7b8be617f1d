"""One change of one group, as a backend writes it down for an auditor.

Invariant: replayed in order, the events of a sequence give the column it is in now. `buffered`
after `taken` or `trained` is a group given back to a learner that came back; `leased` after an end
is a sequence granted again.
"""

from msgspec import Struct


class Event(Struct, frozen=True):
    """`state` is a column of the books (leased, buffered, taken, trained, acknowledged, dropped).

    `reason` is a `DropReason` where the state is `dropped`.
    """

    sequence: int
    state: str
    reason: str | None
    lease_id: str
