"""One run: the model it starts from, its launch, and its line."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from actors.prompts import open_prompts
from streamrl.config import RunConfig, load_config
from tests.benchmarks.async_runs.figures import figures
from tests.benchmarks.async_runs.held_out import checkpoints, curve
from tests.benchmarks.async_runs.records import Line, read_record
from tests.benchmarks.async_runs.settings import Mode, Workload, configuration, name_of

STREAMRL = str(Path(sys.executable).with_name("streamrl"))


@dataclass(frozen=True)
class Plan:
    """What all runs of one workload and seed have in common."""

    folder: Path
    workload: Workload
    seed: int
    steps: int
    checkpoints: int


def run(plan: Plan, mode: Mode) -> Line:
    """Launch, wait for the end, and return the run's line."""
    path = write_configuration(plan, mode)
    config = load_config(path).config
    make_model(config, path)
    streamrl("launch", str(path), "--no-view")
    prompts = open_prompts(config.data, config.run.seed)
    record = read_record(config.run.path, Path(config.data.reward_kwargs["log"]), prompts)
    models = {0: config.model.path, **checkpoints(config.run.path)}
    times = {line["step"]: line["time_s"] for line in record.metrics}
    return {
        "benchmark": "async",
        "workload": plan.workload.name,
        "seed": plan.seed,
        "mode": mode.name,
        "steps": plan.steps,
        **figures(record, prompts),
        "curve": curve(config, plan.workload, models, times),
    }


def write_configuration(plan: Plan, mode: Mode) -> Path:
    settings = configuration(
        str(plan.folder),
        plan.workload,
        mode,
        seed=plan.seed,
        steps=plan.steps,
        checkpoints=plan.checkpoints,
    )
    path = plan.folder / f"{name_of(plan.workload, mode.name, plan.seed)}.yaml"
    path.write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    return path


def make_model(config: RunConfig, path: Path) -> None:
    """Before the launch, so that no run pays for it."""
    if not Path(config.model.path).exists():
        streamrl("get-model", "--config", str(path), "--set", "learner.num_threads=1")


def streamrl(*arguments: str) -> None:
    command = subprocess.run([STREAMRL, *arguments], capture_output=True, text=True, check=False)
    if command.returncode:
        raise SystemExit(command.stdout + command.stderr)
