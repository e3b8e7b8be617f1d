"""A short real run, from a warm start to a policy that can do the task, and its curve.

    PYTHONPATH=. python tests/benchmarks/gpu/learning.py [--steps 300] [--device cuda:0]
        [--configuration configs/quickstart.yaml] [--set KEY=VALUE ...]

`streamrl launch` of a configuration with learner and generators on the device; by default the
quickstart, which needs nothing but its own small model. One JSON line with the training reward at
eleven places of the run; one that fails says why. report.py runs it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from streamrl.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[3]
PLACES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--configuration", default="configs/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"benchmark": "gpu_learning", **launched(options, Path(folder))}))


def launched(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    given = [
        f"run.folder={folder}",
        f"run.max_steps={options.steps}",
        "run.name=learning",
        f"model.path={folder}/model",
        f"learner.device={options.device}",
        f"generator.device={options.device}",
        "buffer.url=zmq://127.0.0.1:0",
        "weights.address=tcp://127.0.0.1:0",
        *options.set,
    ]
    words = [sys.executable, "-m", "streamrl.cli.main", "launch", options.configuration]
    sets = [word for text in given for word in ("--set", text)]
    start = time.monotonic()
    ended = subprocess.run(
        [*words, "--no-view", "--strict", *sets],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    line: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    steps = read_metrics(folder / "learning" / "metrics.jsonl")
    if ended.returncode or not steps:
        line["error"] = f"exit code {ended.returncode}: {ended.stdout[-600:]}"
    rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
    if rewards:
        shown = [rewards[i * (len(rewards) - 1) // PLACES] for i in range(PLACES + 1)]
        line |= {
            "first_reward": round(rewards[0], 3),
            "last_reward": round(rewards[-1], 3),
            "rewards": " ".join(f"{reward:.2f}" for reward in shown),
        }
    return {**line, "steps": len(steps)}


if __name__ == "__main__":
    main()
