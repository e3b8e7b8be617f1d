"""The fence: a call of a learner is refused unless its term is the ledger's."""

from streamrl.errors import FencedError, LostMemoryError


def require_learner_term(learner_term: int, current: int) -> None:
    """Refuse a learner of another term than the `current` one.

    Raises:
        FencedError: another learner attached later.
        LostMemoryError: the learner attached to a later state than this one.
    """
    if learner_term < current:
        raise FencedError(f"this learner is of term {learner_term}; term {current} took over")
    if learner_term > current:
        raise LostMemoryError(f"lost memory: this buffer knows term {current}, not {learner_term}")
