"""Publishing weights to receivers in processes of their own: bytes/s, and the pause it costs.

    PYTHONPATH=. python tests/benchmarks/bench_weights.py [--sizes 100 1000] [--receivers 1 2 4]
        [--rounds 3] [--cases shared files delta gpu]

Sizes are MB of bfloat16 parameters. Each receiver is a real `WeightReceiver` that stages and swaps
as the HF engine does. A broadcast over gloo, and memory that is shared, each against a bare gloo
broadcast of one flat tensor among the same processes, by turns in the same run, with and without
checksums; then files, whole and as differences after 3 % of the weights moved by one bit.
`receive_s` is the slowest receiver's, from the message with the endpoint until the last byte is
staged; `total_s` from publishing until all have loaded it. On a GPU, the memory of one that all
share; and where there are enough, NCCL from one to the others. Best of the rounds; one JSON line
per case; nobody imports this.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

from streamrl.config.weights import WeightSettings
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.sender import WeightSender
from tests.benchmarks.weight_load import (
    WAIT_S,
    flat_of,
    join_bare,
    make_parameters,
    move_some,
    receive,
)

WARM_UP = 2
CASES = ["shared", "files", "delta", "gpu"]
"""Besides the broadcast, which the others are compared with."""
# Parameters, two send buffers, the base of differences; and three where the first update arrives.
COPIES_SENDER, COPIES_RECEIVER = 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--receiver", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.receiver:
        asyncio.run(receive(*arguments.receiver))
        return
    for size in arguments.sizes:
        for count in arguments.receivers:
            asyncio.run(report(size, count, arguments.rounds, arguments.cases))


async def report(size: int, count: int, rounds: int, cases: list[str]) -> None:
    about = {"benchmark": "weights", "mb": size, "receivers": count, "cores": os.cpu_count()}
    needed = (COPIES_SENDER + COPIES_RECEIVER * count) * size * 10**6
    if needed > psutil.virtual_memory().available:
        reason = f"{needed / 1e9:.1f} GB of free memory are needed"
        print(json.dumps({**about, "skipped": reason}), flush=True)
        return
    async for line in measure(size * 10**6, count, rounds, cases):
        print(json.dumps({**about, **line}), flush=True)


async def measure(
    size: int, count: int, rounds: int, cases: list[str]
) -> AsyncIterator[dict[str, Any]]:
    async with receiving(size, count, "cpu") as processes:
        broadcast = await measure_backend(processes, rounds, "gloo")
        yield {"case": "broadcast", **broadcast}
        if "shared" in cases:
            yield {"case": "shared", **await measure_backend(processes, rounds, "shared")}
        for case in [case for case in cases if case in ("files", "delta")]:
            figures = await measure_files(processes, rounds, delta=case == "delta")
            ratio = round(broadcast["total_s"] / figures["total_s"], 3)
            yield {"case": case, **figures, "speed_to_broadcast": ratio}
    if "gpu" in cases:
        yield await measure_on_gpus(size, count, rounds, "shared", num_gpus=1)
        yield await measure_on_gpus(size, count, rounds, "nccl", num_gpus=count + 1)


async def measure_on_gpus(
    size: int, count: int, rounds: int, backend: str, *, num_gpus: int
) -> dict[str, Any]:
    about = {"case": f"{backend} on GPU"}
    if torch.cuda.device_count() < num_gpus:
        reason = f"GPUs needed: {num_gpus}, here: {torch.cuda.device_count()}"
        return {**about, "skipped": reason}
    async with (
        receiving(size, count, "cuda:0" if num_gpus == 1 else "cuda") as processes,
        publishing(processes, backend=backend) as run,
    ):
        return {**about, **best([await run.publish() for _ in range(rounds)])}


async def measure_backend(processes: "Processes", rounds: int, backend: str) -> dict[str, Any]:
    async with publishing(processes, backend=backend) as plain:
        seconds, updates = [], []
        for _ in range(rounds):
            seconds.append(await asyncio.to_thread(processes.broadcast_bare))
            updates.append(await plain.publish())
    async with publishing(processes, backend=backend, verify=True) as verified:
        checked = best([await verified.publish() for _ in range(rounds)])
    figures = best(updates)
    return {
        **figures,
        "bare_s": round(min(seconds), 4),
        "speed_to_bare": round(min(seconds) / figures["receive_s"], 3),
        "verified_receive_s": checked["receive_s"],
    }


async def measure_files(processes: "Processes", rounds: int, *, delta: bool) -> dict[str, Any]:
    async with publishing(processes, transport="files", delta=delta) as run:
        figures = best([await run.publish() for _ in range(rounds)])
        newest = max(run.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        return {**figures, "fraction_of_bytes": round(newest.stat().st_size / processes.size, 4)}


def best(updates: list[dict[str, float]]) -> dict[str, Any]:
    """Of the update that was received fastest; every pause counts."""
    fastest = min(updates, key=lambda update: update["receive_s"])
    pause_s = max(update["pause_s"] for update in updates)
    return {
        **{name: round(value, 4) for name, value in fastest.items()},
        "pause_s": round(pause_s, 6),
        "pause_to_receive": round(pause_s / fastest["receive_s"], 5),
    }


class Processes:
    """The receivers, and the group of bare broadcasts that they share with this process."""

    def __init__(self, size: int, count: int, device: str) -> None:
        self.size, self.count, self.device = size, count, device
        self.parameters = make_parameters(size, device)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_senders = 0
        self._flat = flat_of(self.parameters)

    async def start(self) -> None:
        self._processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--receiver", str(self._store.port), str(number)),
                *(str(self.count), str(self.size), self.device),
                stdout=asyncio.subprocess.PIPE,
            )
            for number in range(1, self.count + 1)
        ]
        self._bare = await asyncio.to_thread(join_bare, self._store, 0, self.count)

    def introduce(self, address: str) -> None:
        """A sender to follow from here on; "" for none any more."""
        self._store.set(f"sender {self._num_senders}", address)
        self._num_senders += 1

    def broadcast_bare(self) -> float:
        """Seconds until every process has the flat tensor."""
        self._bare.broadcast(torch.ones(1), 0).wait()
        self._bare.barrier().wait()
        start = time.perf_counter()
        self._bare.broadcast(self._flat, 0).wait()
        self._bare.barrier().wait()
        return time.perf_counter() - start

    async def reports(self) -> list[dict[str, float]]:
        """The next of each. Waits for all of them, for WAIT_S."""
        async with asyncio.timeout(WAIT_S):
            return [json.loads(await process.stdout.readline()) for process in self._processes]

    async def stop(self) -> None:
        await asyncio.to_thread(self._bare.broadcast(torch.zeros(1), 0).wait)
        self.introduce("")
        for process in self._processes:
            await process.wait()


@contextlib.asynccontextmanager
async def receiving(size: int, count: int, device: str) -> AsyncIterator[Processes]:
    processes = Processes(size, count, device)
    await processes.start()
    try:
        yield processes
    finally:
        await processes.stop()


class Publishing:
    """A sender and those it sends to."""

    def __init__(self, processes: Processes, folder: Path, settings: WeightSettings) -> None:
        self.folder = folder
        self._processes = processes
        layout = Layout(manifest_of(processes.parameters), settings.bucket_bytes)
        self.sender = WeightSender(settings, layout, torch.device(processes.device), folder)
        self._version = 0

    async def start(self) -> None:
        self._processes.introduce(self.sender.address)
        async with asyncio.timeout(WAIT_S):
            while self.sender.gauges()["num_receivers"] < self._processes.count:
                await asyncio.sleep(0.05)
        for _ in range(WARM_UP):
            await self.publish()

    async def publish(self) -> dict[str, float]:
        """One update; waits until every receiver has it."""
        move_some(self._processes.parameters)
        self._version += 1
        self.sender.snapshot(self._processes.parameters, self._version)
        start = time.perf_counter()
        self.sender.publish()
        reports = await self._processes.reports()
        total_s = time.perf_counter() - start
        assert {report["version"] for report in reports} == {self._version}
        timings = self.sender.gauges()
        slowest = {k: max(report[k] for report in reports) for k in ("receive_s", "pause_s")}
        hops = ("snapshot_s", "ready_wait_s")
        return {"total_s": total_s, **slowest, **{hop: timings[hop] for hop in hops}}


@contextlib.asynccontextmanager
async def publishing(processes: Processes, **settings: Any) -> AsyncIterator[Publishing]:
    chosen = {"address": "tcp://127.0.0.1:0", "deadline_s": WAIT_S, **settings}
    with tempfile.TemporaryDirectory() as folder:
        run = Publishing(processes, Path(folder), WeightSettings.model_validate(chosen))
        sending = asyncio.create_task(run.sender.run())
        await run.start()
        yield run
        sending.cancel()
        await asyncio.wait([sending])
        run.sender.close()


if __name__ == "__main__":
    main()
