"""Who follows a run by its stats, such as a validator: nobody else tells them that it is over.

Invariant: the server of a run that is over stays for those who asked within ASKED_WITHIN_S and have
not been answered since. At most MAX_OBSERVERS are remembered, those who asked last.
"""

from collections import OrderedDict

ASKED_WITHIN_S = 3.0
MAX_OBSERVERS = 1024


class Observers:
    """By routing id, who asked last at the end."""

    def __init__(self) -> None:
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()

    def note(self, peer: bytes, now_s: float, *, is_over: bool) -> None:
        """This peer gets the stats now, or ends the run; `is_over` is what it knows of it then."""
        self._asked_s.pop(peer, None)
        if not is_over:
            self._asked_s[peer] = now_s
        if len(self._asked_s) > MAX_OBSERVERS:
            self._asked_s.popitem(last=False)

    def are_waiting(self, now_s: float) -> bool:
        """Whether somebody is likely to ask again who does not know that the run is over."""
        newest_s = next(reversed(self._asked_s.values()), float("-inf"))
        return now_s - newest_s < ASKED_WITHIN_S
