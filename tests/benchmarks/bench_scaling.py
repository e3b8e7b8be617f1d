"""Steps per second of runs with 1, 2, 3, ... generators, beside what the run before it estimated.

    PYTHONPATH=. python tests/benchmarks/bench_scaling.py [--generators 4] [--seconds 30]

The scaling hint of a run (`streamrl.diagnosis.scaling`) says how fast one more generator would
make it; here that run is made. Episodes wait in their environment and the learner waits in its
advantage, so that two cores have room for all: a generator samples 2 groups in EPISODE_S, a batch
has 4, and a step takes the learner LEARNER_S and more: three generators keep it nearly busy. One
JSON line for each bound on staleness and number of generators: `measured` steps/s, `estimated` by
the run with one generator less, the error in per cent, and what limits the run.
Waits for steps of the runs. Nobody imports this.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from streamrl.diagnosis.scaling import ScalingHint, scaling_hint
from streamrl.tracking.jsonl import read_metrics

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
EPISODE_S, LEARNER_S = 1.0, 0.6
WARM_STEPS = 6

ENVIRONMENT = f"""
import asyncio
from streamrl.interfaces import Observation, Transition

class Slow:
    async def start(self, context):
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion):
        await asyncio.sleep({EPISODE_S})
        return Transition(done=True)
"""

ADVANTAGE = f"""
import time
from streamrl.algorithms.sequences import Groups

def slow(batch, settings):
    time.sleep({LEARNER_S})
    return batch.to_tokens(batch.returns - Groups.of(batch.groups).mean(batch.returns))
"""

CONFIG = """
run: {{name: "{name}", folder: "{folder}", max_steps: 100000, evaluate: false}}
model:
  path: {folder}/model
  recipe: {{hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 2,
    alphabet: "0123456789c=", warm_start_steps: 20}}
data: {{source: copy, source_kwargs: {{min_length: 2, max_length: 3}}, max_prompt_length: 8}}
generator:
  count: {count}
  environment: {folder}/environment.py:Slow
  episode: {{max_in_flight: 8}}
  group_size: 4
  max_new_tokens: 6
  max_num_seqs: 16
  num_threads: 1
  drain_s: 1
buffer: {{url: "zmq://127.0.0.1:0", max_staleness: {staleness}}}
learner:
  groups_per_step: 4
  max_tokens_per_micro_batch: 512
  num_threads: 1
  optimizer: {{lr: 1e-4}}
algorithm: {{advantage: "{folder}/advantage.py:slow"}}
weights: {{address: "tcp://127.0.0.1:0"}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generators", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "environment.py").write_text(ENVIRONMENT)
        (folder / "advantage.py").write_text(ADVANTAGE)
        for staleness in (3, 0):
            estimated = None
            for count in range(1, arguments.generators + 1):
                speed, hint = measured(folder, count, staleness, arguments.seconds)
                print(json.dumps(row(staleness, count, speed, estimated, hint)), flush=True)
                estimated = hint.steps_per_s_generator_added


def row(
    staleness: int, count: int, speed: float, estimated: float | None, hint: ScalingHint
) -> Mapping[str, object]:
    known = {"max_staleness": staleness, "generators": count, "measured": round(speed, 3)}
    if estimated is not None:
        error = 100 * (estimated / speed - 1)
        known = {**known, "estimated": round(estimated, 3), "error_percent": round(error, 1)}
    return {**known, "limit": hint.limit, "wanted": hint.num_generators_wanted}


def measured(folder: Path, count: int, staleness: int, seconds: float) -> tuple[float, ScalingHint]:
    """The speed over so many seconds after WARM_STEPS, and the hint of the last step in them."""
    with run(folder, count, staleness) as record:
        wait_for(record, WARM_STEPS)
        time.sleep(seconds)
        lines = read_metrics(record)[WARM_STEPS - 1 :]
    speed = (len(lines) - 1) / (lines[-1]["time_s"] - lines[0]["time_s"])
    hint = scaling_hint(lines[-1])
    assert hint is not None, "the run has not measured how busy it is"
    return speed, hint


@contextmanager
def run(folder: Path, count: int, staleness: int) -> Iterator[Path]:
    """The `metrics.jsonl` of a run that is stopped at the end of the block."""
    name = f"run-{staleness}-{count}"
    config = folder / f"{name}.yaml"
    settings = {"name": name, "folder": folder, "count": count, "staleness": staleness}
    config.write_text(CONFIG.format(**settings))
    launched = subprocess.Popen(
        [STREAMRL, "launch", str(config), "--no-view"],
        stdout=(folder / "launch.log").open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield folder / name / "metrics.jsonl"
    finally:
        launched.send_signal(signal.SIGTERM)
        launched.wait(120)


def wait_for(record: Path, num_steps: int) -> None:
    """Waits until the run has made so many steps, ten minutes at most."""
    deadline = time.monotonic() + 600
    while len(read_metrics(record)) < num_steps:
        assert time.monotonic() < deadline, (record.parents[1] / "launch.log").read_text()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
