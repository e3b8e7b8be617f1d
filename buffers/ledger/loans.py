"""The loans: which groups are lent for which version, and which version trained them.

Invariant: these are exactly the ledger's TAKEN and TRAINED entries, each under the version that the
entry has.
"""

from itertools import chain

from buffers.ledger.entries import Entries
from buffers.ledger.entry import Entry, State
from streamrl.errors import LedgerError


class Loans:
    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._lent: dict[int, list[int]] = {}
        self._trained: dict[int, list[int]] = {}

    def require_turn(self, version: int, current: int) -> None:
        """Refuse a loan out of turn."""
        following = current + len(self._lent.keys() - {version})
        if version != following:
            raise LedgerError(f"take for version {version}; the next to be trained is {following}")

    def prompt_indices(self, version: int) -> tuple[int, ...]:
        """The groups lent for `version`, oldest first; () if there is no such loan."""
        return tuple(self._lent.get(version, ()))

    def lend(self, entry: Entry, version: int) -> None:
        """For the training at `version`."""
        self._entries.move(entry, State.TAKEN, version)
        self._lent.setdefault(version, []).append(entry.prompt_index)

    def train(self, version: int, current: int) -> None:
        """The loan of the version before, which is the `current` one, has made `version`."""
        if version != current + 1 or current not in self._lent:
            raise LedgerError(
                f"advance to {version}: the ledger is at {current} and has lent for "
                f"{sorted(self._lent)}"
            )
        loan = self._lent.pop(version - 1)
        for prompt_index in loan:
            self._entries.move(self._entries[prompt_index], State.TRAINED, version)
        self._trained[version] = loan

    def settle(self, version: int) -> None:
        """Acknowledge what was trained at versions <= `version`."""
        for trained in sorted(v for v in self._trained if v <= version):
            for prompt_index in self._trained.pop(trained):
                self._entries.acknowledge(self._entries[prompt_index])

    def give_back(self) -> list[Entry]:
        """All entries, which are removed here; the caller moves them to another state."""
        prompt_indices = list(chain(*self._lent.values(), *self._trained.values()))
        self._lent.clear()
        self._trained.clear()
        return [self._entries[prompt_index] for prompt_index in prompt_indices]

    def restore(self, entry: Entry) -> None:
        """Add an entry with the state and version that a journal kept; in the order of lending."""
        versions = self._lent if entry.state is State.TAKEN else self._trained
        versions.setdefault(entry.version, []).append(entry.prompt_index)
