"""Whether a learner's books are in proportion to a ledger, before the ledger changes for them.

Invariant: an attach that passes costs time and memory for MAX_REOPENED prompts at most, whatever
numbers the books hold, and leaves books that close. Prompts that the books have finished and the
ledger has never granted cost nothing, however many they are.
"""

from streamrl.errors import LedgerError
from streamrl.types import Books

MAX_REOPENED = 2**18
# What a ledger may have lost of its counts; adding it stays far below the largest `Count`.
MAX_LOST = 2**40


def require_proportion(books: Books, known: Books) -> None:
    """Refuse the `books` of a learner that attaches to the ledger with the books `known`.

    Raises:
        LedgerError: they are no books of a ledger, or of one that is too far from this one.
    """
    if not books.balanced:
        columns = books.in_flight + books.trained + books.acknowledged + sum(books.dropped.values())
        raise LedgerError(
            f"books: do not close: {books.granted} leases were granted, {columns} are accounted for"
        )
    _require_ranges(books)
    for name in ("granted", "next_prompt_index", "revision", "learner_term"):
        was, here = getattr(books, name), getattr(known, name)
        if was > here + MAX_LOST:
            raise LedgerError(f"books.{name}: is {was}; this buffer has {here}")
    num_open = sum(stop - start for start, stop in books.open_ranges)
    num_reopened = num_open + max(0, known.next_prompt_index - books.next_prompt_index)
    if num_reopened > MAX_REOPENED:
        raise LedgerError(
            f"books: {num_reopened} prompts would be granted again, from prompt "
            f"{books.next_prompt_index} on and {num_open} before it; this buffer reopens at most "
            f"{MAX_REOPENED}: move its journal away, and it starts from the learner's checkpoint"
        )


def _require_ranges(books: Books) -> None:
    behind = -1
    for start, stop in books.open_ranges:
        if not behind < start < stop <= books.next_prompt_index:
            raise LedgerError(
                f"books.open_ranges: ({start}, {stop}) follows {behind}; ranges ascend, are apart "
                f"and end at next_prompt_index {books.next_prompt_index}"
            )
        behind = stop
