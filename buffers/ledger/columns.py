"""The ledger's columns: how many entries each state has, which versions may sample the leased, and
which have sampled the buffered.

Invariant: an entry is added when it enters a state and removed before it leaves it, so each is
counted once.
"""

from collections import Counter

from buffers.ledger.entry import Entry, State, header_of


class Columns:
    """`leased_versions` counts the leased entries by `min_policy_version`; not to be changed."""

    def __init__(self) -> None:
        self._counts: Counter[State] = Counter()
        self.leased_versions: Counter[int] = Counter()
        self._newest_versions: Counter[int] = Counter()

    def count(self, state: State) -> int:
        return self._counts[state]

    def newest_buffered(self) -> int:
        """The newest version of a token in the buffered groups; -1 without one."""
        return max(self._newest_versions, default=-1)

    def add(self, entry: Entry) -> None:
        self._counts[entry.state] += 1
        if (counted := self._counted(entry)) is not None:
            versions, version = counted
            versions[version] += 1

    def remove(self, entry: Entry) -> None:
        self._counts[entry.state] -= 1
        if (counted := self._counted(entry)) is not None:
            versions, version = counted
            versions[version] -= 1
            if not versions[version]:
                del versions[version]

    def _counted(self, entry: Entry) -> tuple[Counter[int], int] | None:
        """Where the entry is counted by a version, and by which."""
        match entry.state:
            case State.LEASED:
                return self.leased_versions, entry.min_policy_version
            case State.BUFFERED:
                return self._newest_versions, header_of(entry).newest_version
            case _:
                return None
