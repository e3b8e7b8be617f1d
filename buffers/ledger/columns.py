"""The ledger's columns: how many entries each state has, and how old they are.

Invariant: an entry is added when it enters a state and removed before it leaves it, so each is
counted once.
"""

from collections import Counter

from buffers.ledger.entry import Entry, State, oldest_version


class Columns:
    def __init__(self) -> None:
        self._versions: dict[State, Counter[int]] = {state: Counter() for state in State}
        self._counts: Counter[State] = Counter()

    def count(self, state: State) -> int:
        return self._counts[state]

    def oldest_versions(self, state: State) -> Counter[int]:
        """How many entries of this state there are by oldest version; not to be changed."""
        return self._versions[state]

    def add(self, entry: Entry) -> None:
        self._counts[entry.state] += 1
        self._versions[entry.state][oldest_version(entry)] += 1

    def remove(self, entry: Entry) -> None:
        versions, oldest = self._versions[entry.state], oldest_version(entry)
        self._counts[entry.state] -= 1
        versions[oldest] -= 1
        if not versions[oldest]:
            del versions[oldest]
