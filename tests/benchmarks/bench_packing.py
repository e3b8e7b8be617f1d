"""Packing against verl's partitioning: balance, limit and time, in one run.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/bench_packing.py [--verl FOLDER] \
        [--sizes 256,1024,4096,16384] [--ranks 1,8,64]

256 to 16,384 sequences of log-normal length (median 600, sigma 1, 16 to 8192 tokens) go to 1 to 64
ranks, with a limit of 16,384 tokens a micro-batch, and with one of 8192 up to 4096 sequences. verl
cuts a batch twice with Karmarkar-Karp: into as many sequences for each rank
(`get_seqlen_balanced_partitions`), then on each rank into micro-batches, as many as
`rearrange_micro_batches` computes from the tokens and the limit. Ours are the owners of groups (of
one sequence here), then each rank's micro-batches. The second cut is made on all ranks at once, so
a time is that of the first cut and the slowest rank's second one.

`waiting` is what the step costs because micro-batches differ: ranks compute their first, second and
further micro-batches together, so the largest of each counts; 1 is perfect. `ranks` and
`micro_batches` are the largest over the mean.

verl's file is loaded from FOLDER, from an installed verl, or from one that pip puts into a
temporary folder. Times are the best of alternating rounds of five, of each cut of each rank.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learners.batch.packing import owners, pack

VERL = "verl==0.6.0"
FILE = Path("verl", "utils", "seqlen_balancing.py")
LONGEST = 8192
TIGHT_UP_TO = 4096
MOST_ROUNDS, IN_A_ROW, ENOUGH_S = 100, 5, 1.0

Plan = list[list[list[int]]]
"""[rank][micro-batch][sequence]"""
Times = list[float]
"""Seconds of the first cut, and of each rank's second one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", type=Path, help="folder that has verl/utils/seqlen_balancing.py")
    parser.add_argument("--sizes", default="256,1024,4096,16384")
    parser.add_argument("--ranks", default="1,8,64")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        partition = load_partition(arguments.verl or find_verl(Path(temporary)))
        lines = []
        for size in map(int, arguments.sizes.split(",")):
            for num_ranks in map(int, arguments.ranks.split(",")):
                for limit in (2 * LONGEST, *((LONGEST,) if size <= TIGHT_UP_TO else ())):
                    lines.append(compared(partition, size, num_ranks, limit))
                    print(json.dumps(lines[-1]), flush=True)
        print(json.dumps(summary(lines)))


def compared(
    partition: Callable[..., Any], size: int, num_ranks: int, limit: int
) -> dict[str, Any]:
    """The line of one case."""
    lengths = drawn(size)
    times: dict[str, list[Times]] = {"ours": [], "verl": []}
    begin = time.perf_counter()
    while len(times["ours"]) < MOST_ROUNDS and time.perf_counter() - begin < ENOUGH_S:
        for _ in range(IN_A_ROW):
            taken, ours = of_ours(lengths, limit, num_ranks)
            times["ours"].append(taken)
        for _ in range(IN_A_ROW):
            taken, theirs = of_verl(partition, lengths, limit, num_ranks)
            times["verl"].append(taken)
            if sum(taken) > ENOUGH_S:
                break
    # What other work delays is left out part by part: the slowest of many ranks would be that.
    best = {name: float(slowest(np.array(taken).min(0))) for name, taken in times.items()}
    return {
        "benchmark": "packing",
        **{"sequences": size, "num_ranks": num_ranks, "limit": limit},
        "ratio": round(best["verl"] / best["ours"], 1),
        "ours_ms": round(1e3 * best["ours"], 3),
        "ours": balance(ours, lengths, limit),
        "verl": balance(theirs, lengths, limit),
    }


def slowest(times: NDArray[np.float64]) -> np.float64:
    return times[0] + times[1:].max()


def drawn(size: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(math.log(600), 1.0, size)
    return np.clip(drawn, 16, LONGEST).astype(int).tolist()


def of_ours(lengths: Sequence[int], limit: int, num_ranks: int) -> tuple[Times, Plan]:
    start = time.perf_counter()
    tokens = np.array(lengths, np.int64)
    ranks = owners(tokens, num_ranks)
    seconds: Times = [time.perf_counter() - start]
    plan = []
    for rank in range(num_ranks):
        start = time.perf_counter()
        plan.append(pack(tokens, ranks, rank, limit))
        seconds.append(time.perf_counter() - start)
    return seconds, plan


def of_verl(
    partition: Callable[..., Any], lengths: Sequence[int], limit: int, num_ranks: int
) -> tuple[Times, Plan]:
    start = time.perf_counter()
    shares = partition(lengths, num_ranks, equal_size=True)
    seconds: Times = [time.perf_counter() - start]
    sums = [sum(lengths[i] for i in share) for share in shares]
    pairs = zip(shares, sums, strict=True)
    num_bins = max(min(len(share), -(-held // limit)) for share, held in pairs)
    plan = []
    for share in shares:
        own = [lengths[i] for i in share]
        start = time.perf_counter()
        bins = partition(own, num_bins, equal_size=False)
        bins.sort(key=lambda b: (sum(own[i] ** 2 for i in b), min(b)), reverse=True)
        seconds.append(time.perf_counter() - start)
        plan.append([[share[i] for i in members] for members in bins])
    return seconds, plan


def balance(plan: Plan, lengths: Sequence[int], limit: int) -> dict[str, Any]:
    held = np.array([[sum(lengths[i] for i in members) for members in bins] for bins in plan])
    return {
        "num_micro_batches": len(plan[0]),
        "over_limit": int((held > limit).sum()),
        "waiting": round(float(held.max(0).sum() / (held.sum() / len(plan))), 5),
        "ranks": round(float(held.sum(1).max() / held.sum(1).mean()), 5),
        "micro_batches": round(float(held.max() / held.mean()), 5),
    }


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst case of each figure; `excess` is our waiting less verl's."""
    return {
        "benchmark": "packing",
        "ratio": min(line["ratio"] for line in lines),
        "over_limit": sum(line["ours"]["over_limit"] for line in lines),
        "verl_over_limit": sum(line["verl"]["over_limit"] for line in lines),
        "excess": max(line["ours"]["waiting"] - line["verl"]["waiting"] for line in lines),
        "target": {"ratio": 10, "over_limit": 0, "excess": 0.001},
    }


def find_verl(temporary: Path) -> Path:
    """A folder that holds verl's package: where it is installed, or where pip puts it."""
    spec = importlib.util.find_spec("verl")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]).parent
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", VERL]
    installed = subprocess.run([*command, "--target", str(temporary)], check=False)
    if installed.returncode:
        raise SystemExit(f"{VERL} could not be installed; give its folder by --verl")
    return temporary


def load_partition(folder: Path) -> Callable[..., Any]:
    """verl's function alone: what its file imports of verl is replaced by empty stand-ins."""
    names = ("verl", "verl.protocol", "verl.utils", "verl.utils.device")
    stand_ins = {name: ModuleType(name) for name in (*names, "verl.utils.tensordict_utils")}
    stand_ins["verl.protocol"].DataProto = object  # type: ignore[attr-defined]
    stand_ins["verl.utils"].tensordict_utils = None  # type: ignore[attr-defined]
    stand_ins["verl.utils.device"].get_device_name = None  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    spec = importlib.util.spec_from_file_location("seqlen_balancing", folder / FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = module.get_seqlen_balanced_partitions
    return function


if __name__ == "__main__":
    main()
