"""The generator registry: which generators report to the buffer, and their scheduling states.

Invariant: an id has one session, the newest; an older one that still reports is fenced. A
`SchedulingState` belongs to the id, so it outlasts a generator's process; only DRAINING is removed
when its generator leaves. `buffers/redis/lua/calls.lua` does the same in Redis.
"""

from msgspec import Struct

from streamrl.errors import LedgerError, UnknownGeneratorError
from streamrl.types import GeneratorStatus, SchedulingState, replace

# A process that was suspended may resume after several others of its id have run.
MAX_REPLACED = 8
MAX_GENERATORS = 16_384


class _Report(Struct, frozen=True):
    """The last heartbeat, and the earlier sessions that its session has replaced."""

    status: GeneratorStatus
    seen_s: float
    replaced: tuple[str, ...]


class GeneratorRegistry:
    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self.scheduling_states: dict[str, SchedulingState] = {}
        self._next_timeout_s = 0.0
        self._last_heartbeat_s: float | None = None

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def statuses(self) -> tuple[GeneratorStatus, ...]:
        return tuple(report.status for report in self._reports.values())

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """The seconds since each of `statuses` was reported."""
        return tuple(now_s - report.seen_s for report in self._reports.values())

    def on_attach(self, now_s: float) -> None:
        """A learner attached: from now on the run needs generators."""
        self._last_heartbeat_s = now_s

    def last_age_s(self, now_s: float) -> float:
        """The seconds since any generator reported, or since `on_attach`."""
        return 0.0 if self._last_heartbeat_s is None else now_s - self._last_heartbeat_s

    def fences(self, status: GeneratorStatus) -> bool:
        """Whether a newer session has replaced this one.

        Raises:
            LedgerError: it is one generator too many.
        """
        known = self._reports.get(status.generator_id)
        if known is None and len(self._reports) >= MAX_GENERATORS:
            raise LedgerError(
                f"generator_id: {status.generator_id!r} is new, and {MAX_GENERATORS} generators "
                "report to this buffer, which is all that it takes"
            )
        return known is not None and status.session in known.replaced

    def session_before(self, status: GeneratorStatus) -> str | None:
        """The session that this one replaces, if it is a new one of its generator."""
        known = self._reports.get(status.generator_id)
        if known is None or status.session in (known.status.session, *known.replaced):
            return None
        return known.status.session

    def update(self, status: GeneratorStatus, now_s: float) -> str | None:
        """Store the report; returns the session that it replaces, if there is one."""
        known, older = self._reports.get(status.generator_id), self.session_before(status)
        replaced = known.replaced if known else ()
        if older is not None:
            replaced = (*replaced, older)[-MAX_REPLACED:]
        report = _Report(replace(status, held=()), now_s, replaced)
        self._reports[status.generator_id] = report
        self._last_heartbeat_s = now_s
        return older

    def remove(self, generator_id: str) -> None:
        self._reports.pop(generator_id, None)
        if self.scheduling_state(generator_id) is SchedulingState.DRAINING:
            self.scheduling_states = _without(self.scheduling_states, generator_id)

    def forget_silent(self, now_s: float, timeout_s: float) -> None:
        """Remove the generators whose last report is older than `timeout_s`.

        It is called after every request, so it reads the reports only if one may be that old.
        """
        if now_s <= self._next_timeout_s:
            return
        self._reports = {
            generator_id: report
            for generator_id, report in self._reports.items()
            if now_s - report.seen_s <= timeout_s
        }
        oldest_s = min((report.seen_s for report in self._reports.values()), default=now_s)
        self._next_timeout_s = oldest_s + timeout_s

    def scheduling_state(self, generator_id: str) -> SchedulingState:
        return self.scheduling_states.get(generator_id, SchedulingState.ACTIVE)

    def set_scheduling_state(self, generator_id: str, scheduling_state: SchedulingState) -> None:
        """Set the state of this id.

        Raises:
            UnknownGeneratorError: no generator of this id reports or has a state.
        """
        known = self._reports.keys() | self.scheduling_states.keys()
        if generator_id not in known:
            raise UnknownGeneratorError.among(generator_id, known)
        others = _without(self.scheduling_states, generator_id)
        is_active = scheduling_state is SchedulingState.ACTIVE
        self.scheduling_states = others if is_active else {**others, generator_id: scheduling_state}


def _without(
    scheduling_states: dict[str, SchedulingState], generator_id: str
) -> dict[str, SchedulingState]:
    return {
        name: scheduling_state
        for name, scheduling_state in scheduling_states.items()
        if name != generator_id
    }
