"""What a backend stores of a ledger besides its entries."""

from msgspec import Struct

from streamrl.types import DropReason, RefusalReason, ResponseLengths


class LedgerSnapshot(Struct, frozen=True, kw_only=True):
    """The totals of a ledger: all of its state but the entries.

    `unseen` are the leases that count as granted because a learner's books contain them. `lengths`
    are counted here alone, so books that are adopted do not change them.
    """

    version: int = 0
    learner_term: int = 0
    finished: bool = False
    refused: dict[RefusalReason, int] = {}
    granted: int = 0
    acknowledged: int = 0
    dropped: dict[DropReason, int] = {}
    next_prompt_index: int = 0
    revision: int = 0
    unseen: int = 0
    lengths: ResponseLengths = ResponseLengths()
