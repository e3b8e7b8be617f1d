"""All comparisons with peers, one after the other, on this machine.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.run [--only NAME,...] [--short] \
        [--trl PYTHON] > lines.jsonl
    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.table lines.jsonl

Makes the peers' environments if they are missing (`environments`). Each comparison is a script of
its own with more options; its docstring says what is compared. `--short` shows in minutes that each
runs; its figures mean nothing. Prints the JSON lines of all, and one with `failed` for a comparison
that did not end well. prime-rl is not on PyPI, so none of its functions is compared.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.environments import ROOT, environment, site_packages

BENCHMARKS = ROOT / "tests" / "benchmarks"


@dataclass(frozen=True)
class Comparison:
    """A script, whose argument `option` is the Python of the peer, and what makes it short."""

    peer: str
    script: str
    option: str = "--python"
    long: Sequence[str] = ()
    short: Sequence[str] = ()


COMPARISONS: Mapping[str, Comparison] = {
    "quickstart": Comparison(
        "trl", "peers/quickstart.py", long=("--rounds", "3"), short=("--steps", "40")
    ),
    "steps": Comparison(
        "trl",
        "peers/steps.py",
        long=("--micro-batches", "1,2,4"),
        short=("--shape", "small", "--steps", "3", "--threads", "1+1"),
    ),
    "workload": Comparison(
        "trl",
        "peers/workload.py",
        long=("--micro-batches", "1,4", "--seeds", "0,1,2"),
        short=("--steps", "4", "--checkpoints", "1", "--workloads", "equal"),
    ),
    "trl_async": Comparison("trl", "peers/trl_async.py", option=""),
    "learner_side": Comparison(
        "verl", "peers/learner_side.py", option="--verl", short=("--rounds", "1")
    ),
    "packing": Comparison(
        "verl", "bench_packing.py", option="--verl", short=("--sizes", "256", "--ranks", "1,8")
    ),
    "rollout_is": Comparison("verl", "bench_rollout_is.py", option=""),
    "buffer": Comparison(
        "transfer-queue",
        "bench_buffer.py",
        option="--peer-python",
        short=("--rounds", "1", "--producers", "1"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(COMPARISONS))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--trl", type=Path, help="a Python that has TRL; else one is made")
    arguments = parser.parse_args()
    known = {} if arguments.trl is None else {"trl": arguments.trl}
    for name in chosen(arguments.only):
        comparison = COMPARISONS[name]
        python = known.get(comparison.peer) or environment(comparison.peer)
        for line in lines(name, comparison, python, is_short=arguments.short):
            print(line, flush=True)


def chosen(names: str) -> list[str]:
    """
    Raises:
        SystemExit: one is unknown.
    """
    if unknown := [name for name in names.split(",") if name not in COMPARISONS]:
        raise SystemExit(f"--only: {unknown[0]!r} is none of {', '.join(COMPARISONS)}")
    return names.split(",")


def lines(name: str, comparison: Comparison, python: Path, *, is_short: bool) -> Iterator[str]:
    """The JSON lines of one comparison. Waits for it to end."""
    packages = site_packages(python)
    given = packages / "verl" if comparison.option == "--verl" else python
    if comparison.option == "--verl" and name == "packing":
        given = packages
    options = [comparison.option, str(given)] if comparison.option else []
    # What needs the peer's packages alone runs in its Python, all others in this one.
    own = python if name == "trl_async" else Path(sys.executable)
    command = [str(own), str(BENCHMARKS / comparison.script), *options]
    command += comparison.short if is_short else comparison.long
    paths = [str(ROOT), *([str(packages)] if name == "rollout_is" else [])]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield from (line.rstrip() for line in process.stdout if line.startswith("{"))
    if process.wait():
        yield json.dumps({"benchmark": name, "failed": f"exit code {process.returncode}"})


if __name__ == "__main__":
    main()
