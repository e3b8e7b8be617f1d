"""Steps per second of a small run while strangers flood its ports, over those without.

    PYTHONPATH=. python tests/benchmarks/bench_flood.py [--seconds 20] [--rounds 2]

One run of the quickstart on this machine, with the floods of PORTS one after the other, each
between two windows without. `ratio` is its steps/s over the mean of these two; a `burst` is 40,000
messages at the start of the window instead of messages without end. Waits for steps of the run.
One JSON line a flood; nobody imports this. Another port is another row of PORTS.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from streamrl.tracking.jsonl import read_metrics
from tests.benchmarks import weight_flood
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
STREAMRL = str(Path(sys.executable).with_name("streamrl"))
# Strangers have machines of their own: theirs must not take the cores of the run.
FLOOD = ["nice", "-n", "19", sys.executable, str(Path(__file__).with_name("flood.py"))]
BURST = 40_000
WARM_STEPS, DEADLINE_S = 10, 120.0


class Port(NamedTuple):
    """A port of the run: the setting with its address, and the rows of `flood.FLOODS` for it."""

    setting: str
    scheme: str
    floods: tuple[str, ...]


PORTS = {
    "buffer": Port("buffer.url", "zmq", ("malformed", "nested", "refused")),
    "weights": Port("weights.address", "tcp", ("malformed", *weight_flood.FLOODS)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    urls = {name: f"{port.scheme}://127.0.0.1:{free_port()}" for name, port in PORTS.items()}
    with tempfile.TemporaryDirectory() as folder, run(Path(folder), urls) as record:
        wait_for(record, WARM_STEPS)
        for _ in range(arguments.rounds):
            without = steps_per_s(record, arguments.seconds)
            for names, kind, is_burst in cases():
                commands = [[*FLOOD, urls[name], kind] for name in names]
                if is_burst:
                    commands = [[*command, "--count", str(BURST)] for command in commands]
                with flooded(commands):
                    during = steps_per_s(record, arguments.seconds)
                after = steps_per_s(record, arguments.seconds)
                line = {
                    "benchmark": "flood",
                    "ports": names,
                    "flood": f"{kind} burst" if is_burst else kind,
                    "steps_per_s": round(during, 2),
                    "without": round((without + after) / 2, 2),
                    "ratio": round(2 * during / (without + after), 2),
                }
                print(json.dumps(line), flush=True)
                without = after


def cases() -> Iterator[tuple[list[str], str, bool]]:
    """The ports, the flood, and whether it is a burst: each flood of each port, then all ports."""
    for name, port in PORTS.items():
        yield [name], port.floods[0], True
        for kind in port.floods:
            yield [name], kind, False
    if len(PORTS) > 1:
        yield list(PORTS), "malformed", False


@contextmanager
def run(folder: Path, urls: dict[str, str]) -> Iterator[Path]:
    """A launched run; gives the file with its metrics. Killed in the end, with its daemons."""
    settings = {
        "run.folder": folder,
        "run.max_steps": 100_000,
        "model.path": folder / "model",
        **{PORTS[name].setting: url for name, url in urls.items()},
    }
    overrides = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [STREAMRL, "launch", "configs/quickstart.yaml", "--new", "--no-view", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield folder / "quickstart" / "metrics.jsonl"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def flooded(commands: list[list[str]]) -> Iterator[None]:
    silent = subprocess.DEVNULL
    floods = [subprocess.Popen(command, cwd=ROOT, stdout=silent) for command in commands]
    try:
        yield
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()


def wait_for(record: Path, num_steps: int) -> None:
    """Waits until the run has made so many steps, or DEADLINE_S."""
    until_s = time.monotonic() + DEADLINE_S
    while num_made(record) < num_steps:
        if time.monotonic() > until_s:
            sys.exit(f"the run has made {num_made(record)} steps in {DEADLINE_S:g} s")
        time.sleep(0.05)


def num_made(record: Path) -> int:
    return len(read_metrics(record)) if record.exists() else 0


def steps_per_s(record: Path, seconds: float) -> float:
    """From one step to another, about `seconds` later, so that no part of a step counts as none."""
    first = num_made(record)
    wait_for(record, first + 1)
    start_s, first = time.monotonic(), num_made(record)
    time.sleep(seconds)
    last = num_made(record)
    wait_for(record, last + 1)
    return (num_made(record) - first) / (time.monotonic() - start_s)


if __name__ == "__main__":
    main()
