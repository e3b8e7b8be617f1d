"""A limit on what is written about events that may come without end."""


class Sampler:
    """Admits `burst` events at once, and one more each `every_s`; `num_omitted` counts the others
    since the last that was admitted."""

    def __init__(self, *, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._tokens = float(burst)
        self._at_s = float("-inf")
        self._num_omitted = 0

    def admits(self, now_s: float) -> bool:
        gained = (now_s - self._at_s) / self._every_s
        self._tokens, self._at_s = min(self._burst, self._tokens + gained), now_s
        if self._tokens < 1:
            self._num_omitted += 1
            return False
        self._tokens -= 1
        return True

    def take_omitted(self) -> str:
        """How many were omitted since the last call, as the end of a log line; "" for none."""
        num_omitted, self._num_omitted = self._num_omitted, 0
        return f"; {num_omitted} more were not logged" if num_omitted else ""
