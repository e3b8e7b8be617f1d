"""Steps per second of a run on two hosts while strangers on a third one flood a port, or both.

    PYTHONPATH=. python tests/benchmarks/bench_host_flood.py [--seconds 15] [--rounds 1]

The hosts are network namespaces with an sshd (`tests.deploy.namespaces`; root), the run is started
with `streamrl launch` over ssh and has keys; the stranger has none. Each flood stands between two
windows without; `ratio` is its steps/s over the mean of these two. The stranger shares this
machine's cores with the run, at the lowest priority. One JSON line a flood. Waits for steps.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.bench_flood import WARM_STEPS, steps_per_s, wait_for
from tests.benchmarks.stranger import KINDS
from tests.deploy.namespaces import Machine, missing, network
from tests.system.conftest import CONFIG, STREAMRL

ROOT = Path(__file__).parents[2]
PORTS = {"buffer": 29_600, "weights": 29_601}
CLUSTER = """
cluster:
  hosts:
  - {{name: a, address: {a}, roles: [buffer, learner]}}
  - {{name: b, address: {b}, roles: [generator], generators: 1}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    if why := missing():
        sys.exit(f"bench_host_flood: {why}")
    with tempfile.TemporaryDirectory() as name, network(Path(name), "a", "b", "c") as net:
        addresses = {host.name: host.address for host in net.hosts.values()}
        text = CONFIG.format(folder="runs", model="model") + CLUSTER.format(**addresses)
        desk, stranger = net.hosts["a"], net.hosts["c"]
        (desk.home / "run.yaml").write_text(text)
        with launched(desk):
            record, keys = desk.home / "runs/run/metrics.jsonl", desk.home / "runs/run/keys"
            wait_for(record, WARM_STEPS)
            for _ in range(arguments.rounds):
                measure(stranger, addresses["a"], record, keys, arguments.seconds)


def measure(stranger: Machine, address: str, record: Path, keys: Path, seconds: float) -> None:
    without = steps_per_s(record, seconds)
    for names in (["buffer"], ["weights"], ["buffer", "weights"]):
        for kind in KINDS:
            words = [kind, "--seconds", str(10 * seconds)]
            words += ["--server-public", str(keys / "server.public")] * (kind == "guessed")
            urls = [f"tcp://{address}:{PORTS[name]}" for name in names]
            with flooded(stranger, [[url, *words] for url in urls]):
                during = steps_per_s(record, seconds)
            after = steps_per_s(record, seconds)
            line = {
                "benchmark": "host_flood",
                "ports": names,
                "stranger": kind,
                "steps_per_s": round(during, 2),
                "without": round((without + after) / 2, 2),
                "ratio": round(2 * during / (without + after), 2),
            }
            print(json.dumps(line), flush=True)
            without = after


@contextmanager
def launched(desk: Machine) -> Iterator[None]:
    settings = {"run.max_steps": 100_000, "generator.count": 1}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = desk.command(STREAMRL, "launch", "run.yaml", "--no-view", *words)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        for pid in (pid for words, pid in desk.processes().items() if "streamrl launch" in words):
            os.kill(pid, signal.SIGTERM)
        process.wait()


@contextmanager
def flooded(stranger: Machine, floods: list[list[str]]) -> Iterator[None]:
    script = str(Path(__file__).with_name("stranger.py"))
    command = ["env", f"PYTHONPATH={ROOT}", "nice", "-n", "19", sys.executable, script]
    silent = subprocess.DEVNULL
    running = [
        subprocess.Popen(stranger.command(*command, *words), stdout=silent) for words in floods
    ]
    try:
        yield
    finally:
        for found, pid in stranger.processes().items():
            if "stranger.py" in found:
                os.kill(pid, signal.SIGKILL)
        for flood in running:
            flood.wait()


if __name__ == "__main__":
    main()
