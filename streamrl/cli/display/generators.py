"""The table of generators, the same in every command: each row is a generator's last heartbeat."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S, reports
from streamrl.diagnosis.scaling import busy_frac
from streamrl.types import BufferStats, GeneratorStatus, SchedulingState

_MAX_WIDTH = 200


class GeneratorRow(Struct, frozen=True, kw_only=True):
    """One generator; fields are None if it has not reported. `num_versions_behind` is the distance
    to the learner's version; lease ages are as of the last heartbeat, which is `heartbeat_age_s`
    old. `busy_frac` is the used share of its room for groups, `kv_usage` that of the engine's KV
    cache, and `pause_frac` the share of time in which the engine pauses for weights."""

    id: str
    state: str
    policy_version: int | None = None
    num_versions_behind: int | None = None
    num_leases: int | None = None
    oldest_lease_s: float | None = None
    num_active: int | None = None
    tokens_per_s: float | None = None
    busy_frac: float | None = None
    kv_usage: float | None = None
    pause_frac: float | None = None
    heartbeat_age_s: float | None = None


def generator_rows(stats: BufferStats, before: BufferStats | None = None) -> Iterator[GeneratorRow]:
    """Generators that report, then those with only a known scheduling state; each sorted by id.

    `busy_frac` covers the time since an earlier reading (`before`), or since the generator's start.
    """
    earlier = {} if before is None else {status.session: status for status in before.generators}
    for status, age_s in sorted(reports(stats), key=lambda report: report[0].generator_id):
        yield GeneratorRow(
            id=status.generator_id,
            state=_state(status, age_s, stats.scheduling_states),
            policy_version=status.policy_version,
            num_versions_behind=stats.policy_version - status.policy_version,
            num_leases=len(status.lease_ids),
            oldest_lease_s=max(status.lease_ages_s, default=None),
            num_active=status.num_active,
            tokens_per_s=status.tokens_per_s,
            busy_frac=busy_frac(status, earlier.get(status.session)) if status.uptime_s else None,
            kv_usage=status.kv_usage,
            pause_frac=status.pause_s / status.uptime_s if status.uptime_s else None,
            heartbeat_age_s=age_s,
        )
    present = {status.generator_id for status in stats.generators}
    for generator_id, scheduling_state in sorted(stats.scheduling_states.items()):
        if generator_id not in present:
            yield GeneratorRow(id=generator_id, state=f"{scheduling_state}, away")


def print_generators(stats: BufferStats) -> None:
    """Print one row per generator."""
    # Wide, so that a row stays one line for `grep` and `awk`, also in a narrow terminal or a pipe.
    Console(width=_MAX_WIDTH, soft_wrap=True).print(generator_table(generator_rows(stats)))


def _state(
    status: GeneratorStatus, age_s: float, scheduling_states: dict[str, SchedulingState]
) -> str:
    state = scheduling_states.get(status.generator_id, SchedulingState.ACTIVE)
    if age_s > HEARTBEAT_TIMEOUT_S:
        return "silent" if state is SchedulingState.ACTIVE else f"{state}, silent"
    if state is SchedulingState.ACTIVE and status.is_catching_up:
        return "catching up"
    return str(state)


_COLUMNS: dict[str, Callable[[GeneratorRow], Any]] = {
    "version": lambda row: row.policy_version,
    "behind": lambda row: row.num_versions_behind,
    "leases": lambda row: row.num_leases,
    "oldest lease": lambda row: _seconds(row.oldest_lease_s),
    "sequences": lambda row: row.num_active,
    "tokens/s": lambda row: None if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
    "busy": lambda row: _percent(row.busy_frac),
    "KV": lambda row: _percent(row.kv_usage),
    "pause": lambda row: _percent(row.pause_frac),
    "heartbeat": lambda row: _seconds(row.heartbeat_age_s),
}
_NARROW = frozenset(_COLUMNS) - {"behind", "oldest lease", "sequences"}


def generator_table(rows: Iterable[GeneratorRow], *, is_narrow: bool = False) -> Table:
    """The table of generators. `is_narrow`: without the columns that do not fit into 80
    characters."""
    columns = {name: cell for name, cell in _COLUMNS.items() if name in _NARROW or not is_narrow}
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("generator", "state"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = (cell(row) for cell in columns.values())
        table.add_row(row.id, row.state, *("" if cell is None else str(cell) for cell in cells))
    return table


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.0f} %"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} s"
