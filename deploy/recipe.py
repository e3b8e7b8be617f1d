"""Runs a recipe of `configs/recipes/` and prints its results as one JSON line: `make recipe`.

    recipe.py NAME [--seed N] [--folder FOLDER] [--set KEY=VALUE]...

The run's folder is FOLDER/runs/NAME-SEED, and its model is put into FOLDER/models; FOLDER is the
repository's root by default. A pretrained model computes in float32 if the CPU has no bfloat16
instructions. Rewards are means over the first and the last five steps; `seconds` is the time of the
whole launch, `peak_mib` the largest sum of the memory of its processes, with shared pages divided
among them.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from streamrl.cli.check.machine import read_machine

ROOT = Path(__file__).parents[1]
STREAMRL = str(Path(sys.executable).with_name("streamrl"))
MODEL = "smollm2-135m"
ENDS = 5
POLL_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    arguments = parser.parse_args()
    folder = ROOT / "configs" / "recipes" / arguments.name
    if not (folder / "config.yaml").is_file():
        known = sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))
        parser.error(f"NAME: was {arguments.name!r}; allowed: {', '.join(known)}")
    runs = arguments.folder.resolve() / "runs"
    run_name = f"{arguments.name}-{arguments.seed}"
    places = [f"run.folder={runs}", f"run.name={run_name}", f"run.seed={arguments.seed}"]
    settings = [*places, *_model(folder, arguments.folder.resolve()), *arguments.settings]
    command = [STREAMRL, "launch", "config.yaml", "--new", "--no-view"]
    start = time.monotonic()
    code, peak_mib = run([*command, *(f"--set={setting}" for setting in settings)], folder)
    if code == 0:
        seconds = round(time.monotonic() - start)
        figures = {**outcome(runs / run_name), "seconds": seconds, "peak_mib": round(peak_mib)}
        run_of = {"recipe": arguments.name, "seed": arguments.seed}
        print(json.dumps({**run_of, **figures}), flush=True)
    return code


def _model(recipe: Path, folder: Path) -> list[str]:
    """Get the recipe's model, and return the settings for it; none if the recipe makes its own."""
    if f"models/{MODEL}" not in (recipe / "config.yaml").read_text(encoding="utf-8"):
        return []
    model = folder / "models" / MODEL
    command = [STREAMRL, "get-model", MODEL, "--output", str(model)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    is_slow = read_machine().lacks_bfloat16
    dtypes = [f"{role}.dtype=float32" for role in ("learner", "generator") if is_slow]
    return [f"model.path={model}", *dtypes]


def run(command: list[str], folder: Path) -> tuple[int, float]:
    """Run the command to its end; returns its exit code, and the peak memory of the command and
    its descendants in MiB."""
    process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(map(_proportional_mib, _family(process.pid))))
        time.sleep(POLL_S)
    return process.returncode, peak


def outcome(folder: Path) -> dict[str, Any]:
    """Return the rewards of the first and last steps, the mean seconds of a step, and the held-out
    reward with greedy sampling."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    names = [name for name in ("reward/exact", "reward/mean") if name in lines[0]]
    evaluation = folder / "evaluation.json"
    scores = json.loads(evaluation.read_text()) if evaluation.exists() else {}
    return {
        **{name: [_mean(lines[:ENDS], name), _mean(lines[-ENDS:], name)] for name in names},
        "held_out": scores.get("greedy_reward_mean"),
        "steps": len(lines),
        "step_s": _mean(lines, "learner/step_s"),
    }


def _mean(lines: list[dict[str, Any]], name: str) -> float:
    return round(sum(line[name] for line in lines) / len(lines), 3)


def _family(pid: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(child))]


def _proportional_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    sys.exit(main())
