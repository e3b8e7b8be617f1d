"""The books of a run in lines: an equation, and whether it holds."""

from streamrl.types import Books

_COLUMNS = ("leased", "buffered", "taken", "trained", "acknowledged")


def books_rows(books: Books) -> list[tuple[str, str]]:
    """Name and value of each line."""
    columns = ((name, getattr(books, name)) for name in _COLUMNS)
    parts = " + ".join(f"{count} {name}" for name, count in columns if count)
    reasons = ", ".join(f"{reason} {count}" for reason, count in books.dropped.items())
    total = sum(books.dropped.values())
    dropped = f" + {total} dropped ({reasons})" if total else ""
    return [("groups", f"{books.granted} leased = {parts}{dropped}"), ("", balance(books))]


def balance(books: Books) -> str:
    return "the books close" if books.balanced else "THE BOOKS DO NOT CLOSE"
