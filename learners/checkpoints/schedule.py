"""When a learner saves: every `learner.checkpoint.every` steps, and after a failure again soon.

Invariant: one save is under way at a time, and one that is due meanwhile begins after it; no more
than MAX_UNSAVED intervals of steps are made without a checkpoint, since the buffer keeps the groups
of each until one is durable. Pure; the caller reads the clock.
"""

RETRY_S = 20.0
MAX_UNSAVED = 3


class SaveSchedule:
    """Of a learner whose newest checkpoint is that of `saved_version`."""

    def __init__(self, every: int, saved_version: int) -> None:
        self._every = every
        self.saved_version = saved_version
        self.failure = ""
        self._is_saving = False
        self._begun_version = saved_version
        self._retry_at_s = 0.0

    def is_due(self, policy_version: int, now_s: float) -> bool:
        """Whether a checkpoint of this version is to be saved now."""
        if self._is_saving or policy_version == self.saved_version:
            return False
        is_regular = policy_version // self._every > self._begun_version // self._every
        return is_regular or (bool(self.failure) and now_s >= self._retry_at_s)

    def must_wait(self, policy_version: int) -> bool:
        """Whether no step may be made before a checkpoint is saved."""
        is_behind = policy_version - self.saved_version >= MAX_UNSAVED * self._every
        return is_behind and (self._is_saving or bool(self.failure))

    def began(self, policy_version: int) -> None:
        self._is_saving, self._begun_version = True, policy_version

    def failed(self, reason: str, now_s: float) -> None:
        self._is_saving = False
        self.failure, self._retry_at_s = reason, now_s + RETRY_S

    def saved(self) -> None:
        self._is_saving = False
        self.failure, self.saved_version = "", self._begun_version

    def sentence(self, policy_version: int) -> str:
        """Why the newest steps are in no checkpoint; "" if the last one was saved."""
        if not self.failure:
            return ""
        steps = f"the steps since {self.saved_version} are in no checkpoint"
        waits = ", and the learner waits" if self.must_wait(policy_version) else ""
        return f"{self.failure}; {steps}{waits}"
