"""What happened to the daemons of a run, from their logs: starts, ends, kills, warnings.

Invariant: at most NUM_EVENTS, the faults first; a log is read a line at a time.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

NUM_EVENTS = 400
_LONGEST = 300
Kind: TypeAlias = Literal["fault", "warning", "start", "stop"]
_ORDER: tuple[Kind, ...] = ("fault", "start", "stop", "warning")
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(?P<ms>\d{3}))? (?P<who>\S+) (?P<rest>.*)"
)
_RECORD = re.compile(r"(?P<level>[DIWEC]) (?P<logger>\S+): (?P<text>.*)")
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}
_STARTS = re.compile(r"serving at |\S+ serves |attached at version |starting from ")
_STOPS = re.compile(r".*: draining|.*: done$|the run is over|drained")


@dataclass(frozen=True)
class PageEvent:
    """At a Unix time, of the daemon whose log has it."""

    time_s: float
    role: str
    kind: Kind
    text: str


class _Record(NamedTuple):
    time_s: float
    level: str
    text: str


def read_events(run: Path) -> list[PageEvent]:
    """In the order of their times."""
    found = [event for log in sorted((run / "logs").glob("*.log")) for event in _events(log)]
    kept = sorted(found, key=lambda event: (_ORDER.index(event.kind), -event.time_s))[:NUM_EVENTS]
    return sorted(kept, key=lambda event: event.time_s)


def _events(log: Path) -> Iterator[PageEvent]:
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _of_json(line) if line.startswith("{") else _of_text(line)
            if record is not None and (kind := _kind(record)):
                yield PageEvent(record.time_s, log.stem, kind, record.text[:_LONGEST])


def _of_text(line: str) -> _Record | None:
    found = _LINE.match(line)
    if found is None:
        return None
    try:
        time_s = _time_s(found["time"]) + int(found["ms"] or 0) / 1000
    except (ValueError, OverflowError):
        # Somebody's code has printed it.
        return None
    if found["who"] == "launcher:":
        return _Record(time_s, "error", found["rest"])
    record = _RECORD.match(found["rest"])
    return record and _Record(time_s, _LEVELS[record["level"]], record["text"])


def _of_json(line: str) -> _Record | None:
    """A line of `streamrl.log_lines`."""
    try:
        fields = json.loads(line)
        time_s = datetime.fromisoformat(fields["time"]).timestamp()
        return _Record(time_s, fields["level"], str(fields["message"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _kind(record: _Record) -> Kind | None:
    match record.level:
        case "error" | "critical":
            return "fault"
        case "warning":
            return "warning"
    if _STARTS.match(record.text):
        return "start"
    return "stop" if _STOPS.match(record.text) else None


def _time_s(text: str) -> float:
    """Logs have the local time of the machine."""
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))
