"""`metrics.jsonl`: one JSON object a step, written whole, in order, each step once.

`trained.jsonl` is written the same way: the prompts that each step trained.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TAIL_BYTES = 2**18
TRAINED_FILE = "trained.jsonl"


class JsonlTracker:
    """Appends to the file, after it has removed the lines of `first_step` and later."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        line = json.dumps({"step": step, **{name: _plain(v) for name, v in metrics.items()}})
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line that was cut off is left out."""
    if not path.exists():
        return []
    return [line for text in path.read_text().splitlines() if (line := _parsed(text))]


def read_last(path: Path) -> dict[str, Any]:
    """The last whole line of a `metrics.jsonl`, {} without one; reads only the end of the file."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for text in reversed(lines) if (line := _parsed(text))), {})


def _keep_before(path: Path, first_step: int) -> None:
    kept = [line for line in read_metrics(path) if line["step"] < first_step]
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
    unfinished.replace(path)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and "step" in line else None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return round(value, 8) if math.isfinite(value) else None
    return value
