"""Which groups are lent for which version, and which version trained them.

Invariant: these are exactly the account's TAKEN and TRAINED entries; an entry carries the version
it is here under. Only `buffers.ledger.ledger` calls it.
"""

from itertools import chain

from buffers.ledger.entries import Entries, Entry, State
from streamrl.errors import ConfigError, LedgerError
from streamrl.types import admission_capacity


class Loans:
    def __init__(self, entries: Entries, groups_per_step: int, max_staleness: int) -> None:
        self._entries = entries
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self.loans: dict[int, list[int]] = {}
        self._trained: dict[int, list[int]] = {}

    @property
    def capacity(self) -> int:
        """Groups that admission lets in at a time."""
        return admission_capacity(self._max_staleness, self._groups_per_step)

    def check(self, num_groups: int, version: int, current: int) -> None:
        """Refuse a loan out of turn, and one that admission can never fill."""
        following = current + len(self.loans)
        if version != following:
            raise LedgerError(f"take for version {version}; the next to be trained is {following}")
        if num_groups > self.capacity:
            raise ConfigError(
                f"a batch of {num_groups} groups can never fill: buffer.max_staleness "
                f"{self._max_staleness} and learner.groups_per_step {self._groups_per_step} admit "
                f"{self.capacity}"
            )

    def lend(self, entry: Entry, version: int) -> None:
        """For the training at `version`."""
        self._entries.move(entry, State.TAKEN, version)
        self.loans.setdefault(version, []).append(entry.prompt_index)

    def train(self, version: int) -> None:
        """The loan of the version before has made `version`."""
        loan = self.loans.pop(version - 1)
        for prompt_index in loan:
            self._entries.move(self._entries[prompt_index], State.TRAINED, version)
        self._trained[version] = loan

    def settle(self, version: int) -> None:
        """Acknowledge what was trained at versions <= `version`."""
        for trained in sorted(v for v in self._trained if v <= version):
            for prompt_index in self._trained.pop(trained):
                self._entries.acknowledge(self._entries[prompt_index])

    def give_back(self) -> list[Entry]:
        """Every entry here; the caller gives them another state."""
        prompt_indices = list(chain(*self.loans.values(), *self._trained.values()))
        self.loans.clear()
        self._trained.clear()
        return [self._entries[prompt_index] for prompt_index in prompt_indices]

    def restore(self, entry: Entry) -> None:
        """Put an entry back whose state and version a journal kept; in the order of lending."""
        batches = self.loans if entry.state is State.TAKEN else self._trained
        batches.setdefault(entry.version, []).append(entry.prompt_index)
