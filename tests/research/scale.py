"""Ten thousand generators, simulated: what saturates first, and at which size.

    PYTHONPATH=. python tests/research/scale.py [--sizes 64 1024] [--answers short] [--to FOLDER]
    PYTHONPATH=. python tests/research/scale.py validate [--repeats 3]
    PYTHONPATH=. python tests/research/scale.py measure
    PYTHONPATH=. python tests/research/scale.py payloads
    PYTHONPATH=. python tests/research/scale.py weights

`simulate`, the default, runs loads in simulated time around the real ledger (`scaled.simulation`)
with the costs of `scaled/costs.json`, and prints a table; with `--to` it draws `scale.svg` there.
`measure` measures those costs on this machine and writes them. `validate` measures them, and runs
three loads of different shape both in real time, by a real daemon, and simulated. `payloads`
says how many groups a second the daemon has room for by the size of their payloads, and `weights`
how long a version takes to all generators.
"""

import argparse
import math
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from tests.research.figure import drawn
from tests.research.scaled.costs import Costs, measure, run_real
from tests.research.scaled.load import Load
from tests.research.scaled.simulation import Network, simulate
from tests.research.scaled.weights import Forming, Transfer, measure_forming
from tests.research.script import run_script

COSTS = Path(__file__).parent / "scaled" / "costs.json"
SIZES = (64, 256, 1024, 4096, 10_000)
ANSWERS = {"short": (150.0, 600), "long": (600.0, 2400)}
"""The tokens of the median and of the longest."""
NETWORKS = {"through": Network(), "outside": Network(payloads_outside=True)}
BUSY = ("server", "io thread", "link in", "link out", "reader")
# Of a learner's rank with a GPU, and of a link of 10 Gbit/s for each machine.
TRAINED_TOKENS_PER_S = 10_000.0
VERSION_BYTES, LINK, FILE_SYSTEM = 16e9, 1.25e9, 10e9
DEADLINE_S = 30.0 / 4
"""A group for broadcasts has to form within a quarter of `weights.deadline_s`."""


Busy: TypeAlias = dict[str, list[tuple[int, dict[str, float]]]]
"""By answers and place of the payloads: the number of generators, and the part of the time in which
each resource is busy."""


class Measured(Struct, frozen=True, kw_only=True):
    machine: str
    costs: Costs
    forming: Forming


SHAPES = {
    "many small groups": Load(
        generators=24,
        group_size=2,
        median_tokens=60,
        sigma=0.6,
        max_tokens=150,
        groups_per_step=32,
        step_s=0.2,
        weights_s=0.05,
        seconds=20,
        warm_s=6,
    ),
    "few large groups": Load(
        generators=4,
        groups_at_once=2,
        median_tokens=8000,
        sigma=0.5,
        max_tokens=40_000,
        tokens_per_s=10_000,
        groups_per_step=4,
        max_staleness=4,
        step_s=0.3,
        weights_s=0.05,
        seconds=22,
        warm_s=5,
    ),
    "slow learner": Load(
        generators=16,
        median_tokens=200,
        sigma=0.6,
        max_tokens=2000,
        tokens_per_s=1000,
        groups_per_step=16,
        max_staleness=4,
        step_s=1.0,
        weights_s=0.05,
        seconds=20,
        warm_s=5,
    ),
}


def answers(kind: str, generators: int) -> Load:
    """Four groups of eight at once, 50 tokens/s a sequence; a batch has a group of each generator,
    and the learner trains a quarter faster than generators that never wait."""
    median, longest = ANSWERS[kind]
    load = Load(
        generators=generators,
        median_tokens=median,
        max_tokens=longest,
        groups_per_step=generators,
        step_s=1.0,
    )
    group_s, num_bytes = load.means
    # Of the largest sizes a second costs most, and varies least.
    counted = min(8.0, max(1.5, 4096 / generators))
    tokens_per_s = load.possible * num_bytes / 13
    return msgspec.structs.replace(
        load,
        step_s=0.8 * generators / load.possible,
        ranks=max(1, round(tokens_per_s / TRAINED_TOKENS_PER_S)),
        warm_s=1.2 * group_s,
        seconds=(1.2 + counted) * group_s,
    )


def show_simulated(
    measured: Measured, sizes: tuple[int, ...], kinds: tuple[str, ...], folder: Path | None
) -> None:
    columns = " | ".join(BUSY)
    print(f"| answers | payloads | generators | groups/s | % of possible | staleness | {columns} |")
    print(f"|---|---|{'---:|' * (len(BUSY) + 4)}")
    found: Busy = {}
    for kind in kinds:
        for place, network in NETWORKS.items():
            for size in sizes:
                load = answers(kind, size)
                one = simulate(load, measured.costs, network)
                assert one.outcome.books.balanced, one.outcome.books
                assert one.outcome.num_trained_twice == 0
                found.setdefault(f"{kind}, {place}", []).append((size, one.busy))
                busy = " | ".join(f"{100 * one.busy[name]:.1f}" for name in BUSY)
                rate, part = one.outcome.groups_per_s, one.outcome.groups_per_s / load.possible
                first = f"{kind} | {place} | {size:,} | {rate:,.1f} | {100 * part:.0f}"
                print(f"| {first} | {one.outcome.staleness:.1f} | {busy} |", flush=True)
                costs = ", ".join(f"{name} {us:.0f}" for name, us in one.ledger_us.items())
                note = f"ledger us: {costs}; {one.requests_per_s:,.0f} requests/s"
                waits = f"learner of {load.ranks} ranks waits {one.outcome.waiting:.2f}"
                print(f"{note}; {waits}; {one.took_s:.0f} s", file=sys.stderr, flush=True)
    if folder is not None:
        draw(found, folder / "scale.svg")


def draw(found: Busy, path: Path) -> None:
    """How busy each part of the daemon is, by the number of generators."""
    rows = math.ceil(len(found) / 2)
    with drawn(path, rows, 2, (9.0, 3.5 * rows)) as (_, axes):
        for axis, (title, points) in zip(axes, found.items(), strict=True):
            for name in BUSY:
                percent = [100 * busy[name] for _, busy in points]
                axis.plot([size for size, _ in points], percent, marker="o", label=name)
            axis.set(title=title, xscale="log", ylabel="busy, %", ylim=(0, 105))
            axis.set_xlabel("generators")
        axes[0].legend()


def show_payloads(costs: Costs) -> None:
    """Beside heartbeats; the ledger's part is that of a small simulation."""
    ledger_us = simulate(answers("short", 64), costs, Network()).ledger_us
    ledger_s = (ledger_us["lease"] + ledger_us["put"]) / 1e6
    print("| bytes a group | server | io thread | link | server, payloads outside |")
    print(f"|{'---:|' * 5}")
    for num_bytes in (20_000, 200_000, 1_000_000, 10_000_000):
        seconds = [
            ledger_s + costs.lease_s + costs.of("put", 1, size) + costs.of("fetch", 1, size)
            for size in (num_bytes, 0)
        ]
        rates = (1 / seconds[0], 0.5 / (num_bytes * costs.io_byte_s), LINK / num_bytes)
        cells = " | ".join(f"{rate:,.0f}" for rate in (*rates, 1 / seconds[1]))
        print(f"| {num_bytes:,} | {cells} |")


def show_validated(repeats: int) -> None:
    print("| load | real groups/s | simulated | ratio | real staleness | simulated | difference |")
    print(f"|---|{'---:|' * 6}")
    costs = measure()
    for name, load in SHAPES.items():
        loads = [msgspec.structs.replace(load, seed=seed) for seed in range(repeats)]
        real = [run_real(load) for load in loads]
        assert all(one.books.balanced and not one.num_trained_twice for one in real)
        simulated = [simulate(load, costs, Network(link=1e12)).outcome for load in loads]
        rate, made = (statistics.median(one.groups_per_s for one in o) for o in (real, simulated))
        lag, old = (statistics.median(one.staleness for one in o) for o in (real, simulated))
        rates = f"{rate:.1f} | {made:.1f} | {made / rate:.3f}"
        lags = f"{lag:.2f} | {old:.2f} | {old - lag:+.2f}"
        print(f"| {name} | {rates} | {lags} |", flush=True)
        for kind, outcomes in (("real", real), ("simulated", simulated)):
            spread = ", ".join(f"{one.groups_per_s:.1f}" for one in outcomes)
            print(f"{name}: {kind} {spread} groups/s", file=sys.stderr, flush=True)


def show_weights(forming: Forming, sizes: tuple[int, ...]) -> None:
    transfer = Transfer(num_bytes=VERSION_BYTES, link=LINK, file_system=FILE_SYSTEM)
    ways = transfer.seconds()
    print(f"| generators | {' | '.join(ways)} | forming the broadcast's group |")
    print(f"|{'---:|' * (len(ways) + 2)}")
    for size in sizes:
        seconds = " | ".join(f"{way(size):,.0f} s" for way in ways.values())
        print(f"| {size:,} | {seconds} | {forming.seconds(size, LINK):,.1f} s |")
    limit = forming.limit(DEADLINE_S, LINK)
    print(f"a group forms in {DEADLINE_S:g} s up to {limit} members")


def write_measured() -> None:
    """The costs in the middle of three measurements of each."""
    several = [msgspec.structs.asdict(measure()) for _ in range(3)]
    middle = {name: statistics.median(one[name] for one in several) for name in several[0]}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    forming = measure_forming()
    measured = Measured(machine=machine, costs=Costs(**middle), forming=forming)
    COSTS.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")


def main(arguments: argparse.Namespace) -> int:
    sizes = tuple(arguments.sizes)
    match arguments.command:
        case "measure":
            write_measured()
        case "validate":
            show_validated(arguments.repeats)
        case command:
            measured = msgspec.json.decode(COSTS.read_bytes(), type=Measured)
            if command == "weights":
                show_weights(measured.forming, sizes)
            elif command == "payloads":
                show_payloads(measured.costs)
            else:
                show_simulated(measured, sizes, tuple(arguments.answers), arguments.to)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scale.py", description=__doc__.partition("\n")[0])
    commands = ("simulate", "validate", "measure", "payloads", "weights")
    made.add_argument("command", nargs="?", choices=commands, default="simulate")
    made.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of generators")
    made.add_argument("--answers", choices=ANSWERS, nargs="+", default=tuple(ANSWERS))
    made.add_argument("--repeats", type=int, default=3, help="real runs of each load")
    made.add_argument("--to", type=Path, help="folder for the picture")
    return made


if __name__ == "__main__":
    sys.exit(run_script(parser(), main))
