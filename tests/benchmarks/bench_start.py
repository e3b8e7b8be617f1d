"""From `streamrl launch` to the first step and to the end, with forked and with executed daemons.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/bench_start.py --rounds 3

Two steps of the quickstart and the evaluation of its final checkpoint; the model is made before.
The runs take turns. CPU time and memory (the sum of proportional set sizes) are those of all
processes of the launch, as of the first step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.peers.usage import cpu_s_of, family, proportional_mib

_SETTINGS = {
    "run.max_steps": "2",
    "learner.optimizer.warmup_steps": "0",
    "buffer.url": "zmq://127.0.0.1:0",
    "weights.address": "tcp://127.0.0.1:0",
}
_LAUNCH = """
import sys
from streamrl.cli.main import main
from streamrl.cli.processes import fork_server
if sys.argv.pop(1) == "executed":
    fork_server._can_fork = lambda: False
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    options = parser.parse_args()
    streamrl = Path(sys.executable).with_name("streamrl")
    if not Path("runs/models/reverse").exists():
        subprocess.run([streamrl, "get-model", "--config", options.config], check=True)
    runs: dict[str, list[Mapping[str, float]]] = {"executed": [], "forked": []}
    for _ in range(options.rounds):
        for way, figures in runs.items():
            figures.append(run(way, options.config))
    best = {
        way: {name: min(figures[name] for figures in of_way) for name in of_way[0]}
        for way, of_way in runs.items()
    }
    ratios = {
        name: round(best["forked"][name] / value, 3) for name, value in best["executed"].items()
    }
    print(json.dumps({**best, "ratio": ratios}))


def run(way: str, config: Path) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"run.folder": folder, **_SETTINGS}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        begin = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, way, "launch", config, "--no-view", "--strict", *words],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        ) as launch:
            while not any(file.stat().st_size for file in Path(folder).glob("*/trained.jsonl")):
                assert launch.poll() is None, "the launch has ended without a step"
                time.sleep(0.01)
            first_s, mib = time.monotonic() - begin, sum(map(proportional_mib, family(launch.pid)))
            cpu_s = sum(map(cpu_s_of, family(launch.pid)))
            assert launch.wait() == 0
        end_s = time.monotonic() - begin
    return {
        "first_step_s": round(first_s, 2),
        "first_step_cpu_s": round(cpu_s, 2),
        "end_s": round(end_s, 2),
        "memory_mib": round(mib),
    }


if __name__ == "__main__":
    main()
