"""What Ray costs a run: `PYTHONPATH=. python tests/benchmarks/bench_ray.py [ROUNDS] [STEPS]`.

The same configuration with the same keys, by plain `launch` and by `launch --ray` on a cluster of
one node, in turns: the seconds from the command to the first step, and the steps/s of all but the
first tenth. The daemons of the plain one are executed, as on a machine with GPUs, not forked. The
best round of each counts, since a shared machine only takes away.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ray.cluster_utils import Cluster

from tests.system.conftest import CONFIG, STREAMRL

PLAIN = """
import sys
from streamrl.cli.main import main
from streamrl.cli.processes import fork_server
fork_server._can_fork = lambda: False
sys.exit(main())
"""


class Measured(NamedTuple):
    first_step_s: float
    steps_per_s: float


def measure(folder: Path, name: str, steps: int, *options: str) -> Measured:
    settings = (f"run.name={name}", f"run.max_steps={steps}", "buffer.curve=keys")
    words = [word for setting in settings for word in ("--set", setting)]
    began_s = time.time()
    command = [sys.executable, "-c", PLAIN, "launch", "run.yaml", "--no-view", *words, *options]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_s"] for line in lines]
    skipped = steps // 10
    rate = (len(times) - 1 - skipped) / (times[-1] - times[skipped])
    return Measured(times[0] - began_s, rate)


def main(num_rounds: int = 3, steps: int = 400) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    kinds: dict[str, tuple[str, ...]] = {"plain": (), "ray": ("--ray", cluster.address)}
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "run.yaml").write_text(CONFIG.format(folder="runs", model="model"))
            for command in (("get-model", "--config", "run.yaml"), ("keys", "new", "keys")):
                subprocess.run((STREAMRL, *command), cwd=folder, check=True)
            for index in range(num_rounds):
                for kind, options in kinds.items():
                    found[kind].append(measure(folder, f"{kind}-{index}", steps, *options))
                    print(kind, found[kind][-1], flush=True)
    finally:
        cluster.shutdown()
    first = {kind: min(one.first_step_s for one in found[kind]) for kind in kinds}
    rate = {kind: max(one.steps_per_s for one in found[kind]) for kind in kinds}
    print(f"first step: {first['ray']:.1f} s, plain {first['plain']:.1f} s")
    print(f"steps/s: {rate['ray']:.2f}, plain {rate['plain']:.2f}")
    print(f"ratios: {first['ray'] / first['plain']:.2f}, {rate['ray'] / rate['plain']:.3f}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
