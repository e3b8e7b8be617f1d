"""Asynchronous against synchronous runs that train the same prompts.

    PYTHONPATH=. python tests/benchmarks/bench_async.py [--steps N] [--workloads A,B]
        [--policies wait,train,drop] [--bounds 1,2,4,8] [--seeds 0,1,2] [--checkpoints N]
        [--folder FOLDER]
    PYTHONPATH=. python tests/benchmarks/bench_async.py --table LINES.jsonl

The synchronous runs are the same code with `max_staleness: 0`: generation and training alternate,
and each uses every core, generation as one engine of as many threads or as many engines of one
thread; asynchrony is compared with the faster of the two. In the asynchronous runs, one for each
`buffer.overdue` and `buffer.max_staleness`, two generators and the learner share the cores, one
thread each. All start from one model and read one prompt stream. Workloads (`async_runs/spans.py`):
answers of log-normal length whose longest is about eight times the mean, and short equal ones,
where asynchrony may gain nothing. Seconds are from the first step to the last, without startup.
Checkpoints are scored on held-out prompts after the run.

Prints one JSON line per run; `--table` prints those of a file as tables.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.async_runs.figures import with_ratios
from tests.benchmarks.async_runs.records import Line
from tests.benchmarks.async_runs.run import Plan, run
from tests.benchmarks.async_runs.settings import WORKLOADS, Mode, modes
from tests.benchmarks.async_runs.table import tables


def main() -> None:
    arguments = parse()
    if arguments.table:
        lines = [json.loads(text) for text in arguments.table.read_text().splitlines()]
        print(tables(lines))
        return
    bounds = [int(bound) for bound in arguments.bounds.split(",")]
    chosen = list(modes(arguments.policies.split(","), bounds))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for plan in plans(arguments, folder):
            for line in compared(plan, chosen):
                print(json.dumps(line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default="wait,train,drop", help="values of buffer.overdue")
    parser.add_argument("--bounds", default="2", help="values of buffer.max_staleness")
    parser.add_argument("--seeds", default="0", help="of the model, the prompts and the sampling")
    parser.add_argument("--checkpoints", type=int, default=6, help="scored on held-out prompts")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: nowhere")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print its lines as tables")
    return parser.parse_args()


def plans(arguments: argparse.Namespace, folder: Path) -> Iterator[Plan]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.workloads.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            yield Plan(
                folder.resolve(), WORKLOADS[name], seed, arguments.steps, arguments.checkpoints
            )


def compared(plan: Plan, chosen: Sequence[Mode]) -> Iterator[Line]:
    """The line of each run, as soon as those that it is compared with have ended, too."""
    synchronous = [run(plan, mode) for mode in chosen if not mode.max_staleness]
    yield from with_ratios(synchronous)
    for mode in chosen:
        if mode.max_staleness:
            yield with_ratios([*synchronous, run(plan, mode)])[-1]


if __name__ == "__main__":
    main()
