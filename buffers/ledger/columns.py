"""The ledger's columns: how many entries each state has, and which versions may sample the leased.

Invariant: an entry is added when it enters a state and removed before it leaves it, so each is
counted once.
"""

from collections import Counter

from buffers.ledger.entry import Entry, State


class Columns:
    """`leased_versions` counts the leased entries by `min_policy_version`; not to be changed."""

    def __init__(self) -> None:
        self._counts: Counter[State] = Counter()
        self.leased_versions: Counter[int] = Counter()

    def count(self, state: State) -> int:
        return self._counts[state]

    def add(self, entry: Entry) -> None:
        self._counts[entry.state] += 1
        if entry.state is State.LEASED:
            self.leased_versions[entry.min_policy_version] += 1

    def remove(self, entry: Entry) -> None:
        self._counts[entry.state] -= 1
        if entry.state is State.LEASED:
            self.leased_versions[entry.min_policy_version] -= 1
            if not self.leased_versions[entry.min_policy_version]:
                del self.leased_versions[entry.min_policy_version]
