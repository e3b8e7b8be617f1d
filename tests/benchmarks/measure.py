"""Time and extra memory of a piece of work, each in a process of its own.

A contender is a name that the benchmark's own script understands after `--only`, with the number of
timed runs after `--repeats`. Contenders run by turns in fresh processes. Times are the best seen:
other work on the machine only ever adds. Threads wait passively, so that a busy neighbor does not
turn every barrier into a spin. For the peak malloc is told to give freed memory back at once, so
that pages left over from building the inputs do not hide what the work needs.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Figures = dict[str, float]


def measured(
    work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> Figures:
    """Peak extra memory of a first run, or with repeats the best seconds of that many more."""
    before = _reset_peak()
    work()
    if not repeats:
        return {"extra_mib": (_peak() - before) / 2**20}
    return {"seconds": min(_seconds(work, clock) for _ in range(repeats))}


def contest(
    script: str,
    contenders: Sequence[str],
    *arguments: str,
    threads: int,
    repeats: int,
    rounds: int,
    with_peaks: bool = True,
) -> dict[str, Figures]:
    """Figures per contender; the last line of its run is the JSON of `measured`.

    Without rounds there are no seconds.
    """
    frugal = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "0"}
    measuring = contenders if with_peaks else ()
    peaks = {name: _run(script, name, 0, arguments, threads, frugal) for name in measuring}
    timed = [
        {name: _run(script, name, repeats, arguments, threads, {}) for name in contenders}
        for _ in range(rounds)
    ]
    return {
        name: {**_best([figures[name] for figures in timed]), **peaks.get(name, {})}
        for name in contenders
    }


def _best(runs: Sequence[Figures]) -> Figures:
    return {"seconds": min(run["seconds"] for run in runs)} if runs else {}


def _run(
    script: str,
    contender: str,
    repeats: int,
    arguments: Sequence[str],
    threads: int,
    environment: dict[str, str],
) -> Figures:
    own = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": _repository(script),
    }
    command = [sys.executable, script, "--only", contender, "--repeats", str(repeats), *arguments]
    result = subprocess.run(
        command,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures


def _repository(script: str) -> str:
    paths = [str(Path(script).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def _reset_peak() -> int:
    """Current resident bytes; on Linux the high-water mark starts anew from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
