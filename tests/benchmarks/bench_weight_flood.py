"""Steps per second of a small run while strangers flood its weight port, over those without.

    PYTHONPATH=. python tests/benchmarks/bench_weight_flood.py [--seconds 20] [--kinds failed ...]

One run of the quickstart on this machine, with the floods of `weight_flood` one after the other and
then several at once, each between two windows without. `ratio` is its steps/s over the mean of
these two. Waits for steps of the run; it must not end before. One JSON line a flood; nobody imports
this.
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

from streamrl.tracking.jsonl import read_metrics
from tests.benchmarks.weight_flood import FLOODS
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
STREAMRL = str(Path(sys.executable).with_name("streamrl"))
FLOOD = [sys.executable, str(Path(__file__).with_name("weight_flood.py"))]
WARM_STEPS = 10
TOGETHER = ["failed", "leave", "pretended"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kinds", nargs="+", choices=FLOODS, default=list(FLOODS))
    arguments = parser.parse_args()
    address = f"tcp://127.0.0.1:{free_port()}"
    cases = [[kind] for kind in arguments.kinds] + [TOGETHER]
    with tempfile.TemporaryDirectory() as folder, run(Path(folder), address) as record:
        wait_for(record, WARM_STEPS)
        without = steps_per_s(record, arguments.seconds)
        for kinds in cases:
            with flooded(address, kinds):
                during = steps_per_s(record, arguments.seconds)
            after = steps_per_s(record, arguments.seconds)
            line = {
                "benchmark": "weight flood",
                "flood": " + ".join(kinds),
                "steps_per_s": round(during, 2),
                "without": round((without + after) / 2, 2),
                "ratio": round(2 * during / (without + after), 2),
            }
            print(json.dumps(line), flush=True)
            without = after


@contextmanager
def run(folder: Path, address: str) -> Iterator[Path]:
    """A launched run; gives the file with its metrics. Ended afterwards, with its daemons."""
    settings = {
        "run.folder": folder,
        "run.max_steps": 100_000,
        "model.path": folder / "model",
        "learner.optimizer.schedule": "constant",
        "weights.address": address,
        "buffer.url": f"zmq://127.0.0.1:{free_port()}",
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
def flooded(address: str, kinds: list[str]) -> Iterator[None]:
    floods = [subprocess.Popen([*FLOOD, address, kind], cwd=ROOT) for kind in kinds]
    try:
        yield
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()


def wait_for(record: Path, num_steps: int) -> None:
    """Waits until the run has made so many steps."""
    while num_made(record) < num_steps:
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
