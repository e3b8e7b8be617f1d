"""What a command and all that it starts use: wall clock, CPU and memory, sampled while it runs.

Invariant: CPU seconds are those of the whole family, of the processes that have ended too, so a
difference between two moments is what was used between them. Memory is the sum of proportional set
sizes: pages that processes share count once.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

POLL_S = 0.3
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Samples of one run, of equal number; times are those of `time.time`."""

    times_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    mib: tuple[float, ...]

    @property
    def start_s(self) -> float:
        return self.times_s[0]

    @property
    def peak_mib(self) -> float:
        return max(self.mib)

    def cpu_between(self, start_s: float, end_s: float) -> float:
        """CPU seconds between two moments, linear between samples."""
        start, end = np.interp([start_s, end_s], self.times_s, self.cpu_s)
        return float(end - start)


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float = 3600.0) -> Usage:
    """Waits for the command to end, at most `limit_s`.

    Raises:
        SystemExit: it failed; the message is the end of what it printed.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output
        )
        samples = [_sample(process.pid)]
        while process.poll() is None:
            if time.time() - samples[0][0] > limit_s:
                process.terminate()
            time.sleep(POLL_S)
            samples = [*samples, _sample(process.pid)]
        if process.returncode:
            output.seek(0)
            raise SystemExit(output.read().decode()[-4000:])
    # What has ended counts no longer once its parent has ended too.
    cpu_s = np.maximum.accumulate([cpu for _, cpu, _ in samples])
    times_s, _, mib = zip(*samples, strict=True)
    return Usage(times_s, tuple(cpu_s.tolist()), mib)


def _sample(pid: int) -> tuple[float, float, float]:
    processes = family(pid)
    return time.time(), sum(map(cpu_s_of, processes)), sum(map(proportional_mib, processes))


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(child))]


def cpu_s_of(pid: int) -> float:
    """Its own, and that of its children that have ended and were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def proportional_mib(pid: int) -> float:
    """The proportional set size of a process; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
