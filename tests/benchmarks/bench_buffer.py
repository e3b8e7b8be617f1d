"""Groups through a buffer, against the same bytes through bare sockets, and against TransferQueue.

    PYTHONPATH=. python tests/benchmarks/bench_buffer.py [--peer-python PYTHON]

Each group is leased, put, taken, fetched, trained and acknowledged; 1 or 4 producer processes keep
IN_FLIGHT groups under way each, and this process is the learner. `raw` is the same bytes through a
ROUTER/DEALER echo (for redis: SET and GET) with as many clients and as much in flight; `ratio` is
groups/s over that. `codec` is the same groups encoded, checked once and decoded over bare sockets,
the most that a buffer of these records could do in this language; `of_codec` is groups/s over it.
Contenders take turns and the best round of each counts; servers are of our own, Redis with an
append-only file that is synced every second. One JSON line a case; nobody imports this.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from streamrl import wire
from streamrl.types import pack
from tests.benchmarks import buffer_growth, buffer_load
from tests.benchmarks.buffer_load import IN_FLIGHT, SIZES, template

PEER = Path(__file__).parent / "peers" / "transfer_queue.py"
CONTENDERS = ("raw zmq", "codec", "raw redis", "memory", "zmq", "zmq+journal", "redis")
COUNTS = {"20 KB": 1024, "1 MB": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--producers", default="1,4")
    parser.add_argument("--peer-python", default=None, help="a Python that has TransferQueue")
    arguments = parser.parse_args()
    for size in SIZES:
        peer = transfer_queue(arguments.peer_python, size)
        for producers in map(int, arguments.producers.split(",")):
            seconds = contest(size, producers, arguments.rounds)
            for line in lines(seconds, size, producers, peer):
                print(json.dumps(line), flush=True)
    for line in buffer_growth.measure():
        print(json.dumps({"benchmark": "buffer", **line}), flush=True)


def contest(size: str, producers: int, rounds: int) -> dict[str, float]:
    """The best seconds of each contender and of each raw limit, by turns."""
    count = COUNTS[size] // (producers * IN_FLIGHT) * producers * IN_FLIGHT
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name in CONTENDERS:
            took = buffer_load.run(name, size, producers, count)
            best[name] = min(best.get(name, took), took)
    return {name: took / count for name, took in best.items()}


def lines(
    seconds: dict[str, float], size: str, producers: int, peer: dict[str, object]
) -> Iterator[dict[str, object]]:
    num_bytes = len(wire.encode(pack(template(size))))
    for name, each in seconds.items():
        raw = seconds["raw redis" if "redis" in name else "raw zmq"]
        line: dict[str, object] = {
            "benchmark": "buffer",
            "buffer": name,
            "size": size,
            "producers": producers,
            "ratio": round(raw / each, 3),
            "groups_per_s": round(1 / each, 1),
            "mb_per_s": round(num_bytes / each / 1e6, 1),
            "group_bytes": num_bytes,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        }
        if "zmq" in name:
            line["of_codec"] = round(seconds["codec"] / each, 3)
        if "seconds" in peer and producers == 1:
            line["times_transfer_queue"] = round(float(str(peer["seconds"])) / each, 2)
        elif "reason" in peer and not name.startswith("raw"):
            line["transfer_queue"] = peer["reason"]
        yield line


def transfer_queue(python: str | None, size: str) -> dict[str, object]:
    """Seconds a group through TransferQueue with one producer, or why there are none."""
    if python is None:
        return {"reason": "not measured: --peer-python names no Python that has TransferQueue"}
    num_bytes = len(wire.encode(pack(template(size))))
    command = [python, str(PEER), str(num_bytes), str(COUNTS[size] // 4)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        figures: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"reason": f"{type(error).__name__}: {error}"[:300]}
    about = {"benchmark": "buffer", "buffer": "TransferQueue", "size": size, "producers": 1}
    print(json.dumps({**about, "ratio": None, **figures}), flush=True)
    return figures


if __name__ == "__main__":
    main()
