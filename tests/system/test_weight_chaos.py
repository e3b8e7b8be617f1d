"""A receiver dies or freezes at every hop of an update: the others have it within the deadline.

Receivers are processes of their own, in gloo groups or with the memory of the sender mapped, which
is the test's.
"""

import asyncio
import contextlib
import json
import multiprocessing
import signal
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from streamrl.config.weights import WeightSettings
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.sender import WeightSender
from tests.system.weight_receiver import BUCKET_BYTES, HOPS, SHAPES, Fate, receive
from tests.waiting import until

DEADLINE_S = 6.0
# A survivor that is late gets the whole instead of what changed.
DELTA_DEADLINE_S = 32.0
NAMES = ("a", "victim", "z")

FATES = [
    *(("gloo", hop, 1) for hop in HOPS),
    # The group is formed already, and is kept; so is what is mapped.
    *(("gloo", "ready", 2), ("gloo", "begun", 2), ("shared", "begun", 2)),
    *(("shared", hop, 1) for hop in ("ready", "begun")),
    # What changed since version 1, and then the whole for who has missed it.
    *(("delta", hop, 2) for hop in ("ready", "frame", "received")),
]


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Fleet:
    """Receivers in processes of their own, and their sender."""

    def __init__(self, folder: Path, backend: str, fate: Fate) -> None:
        settings = {
            "backend": "gloo" if backend == "delta" else backend,
            "delta": backend == "delta",
            "address": "tcp://127.0.0.1:0",
            "bucket_bytes": BUCKET_BYTES,
            "deadline_s": DELTA_DEADLINE_S if backend == "delta" else DEADLINE_S,
        }
        layout = Layout(manifest_of(parameters(0.0)), BUCKET_BYTES)
        self.folder = folder
        folder.mkdir()
        self.sender = WeightSender(
            WeightSettings.model_validate(settings), layout, torch.device("cpu"), folder
        )
        never = Fate("never", 0, signal.SIGKILL)
        fates = {name: fate if name == "victim" else never for name in NAMES}
        self.processes = {name: self._start(name, fate) for name, fate in fates.items()}

    def _start(self, name: str, fate: Fate) -> BaseProcess:
        # Forked from a process that has imported torch once for all.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.system.weight_receiver"])
        arguments = (self.sender.address, name, self.folder / name, fate)
        process = context.Process(target=receive, args=arguments, daemon=True)
        process.start()
        return process

    def publish(self, version: int) -> None:
        self.sender.snapshot(parameters(float(version)), version)
        self.sender.publish()

    def loads(self, name: str) -> list[dict[str, Any]]:
        return self._lines(self.folder / name)

    def failures(self, name: str) -> list[dict[str, Any]]:
        return self._lines(self.folder / f"{name}.failed")

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, version: int, *names: str) -> bool:
        newest = [self.loads(name)[-1:] for name in names]
        return all(lines and lines[0]["version"] == version for lines in newest)

    def is_down(self, name: str) -> bool:
        """Dead, or frozen."""
        process = self.processes[name]
        if not process.is_alive():
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        return True


@contextlib.asynccontextmanager
async def fleet(folder: Path, backend: str, fate: Fate) -> AsyncIterator[Fleet]:
    """With every receiver known to the sender."""
    started = Fleet(folder, backend, fate)
    running = asyncio.create_task(started.sender.run())
    try:
        await until(lambda: started.sender.gauges()["num_receivers"] == len(NAMES))
        yield started
    finally:
        running.cancel()
        await asyncio.wait([running])
        for process in started.processes.values():
            process.kill()
            process.join()
        started.sender.close()


async def meet(folder: Path, backend: str, hop: str, version: int, number: signal.Signals) -> None:
    """The victim dies or freezes, and the others get this version and the next ones.

    Two more versions overwrite what a frozen one was reading, if it reads the sender's memory.
    """
    async with fleet(folder, backend, Fate(hop, version, number)) as run:
        for earlier in range(1, version):
            run.publish(earlier)
            await until(lambda v=earlier: run.has(v, *NAMES))
        run.publish(version)
        await until(lambda: run.is_down("victim"))
        await until(lambda: run.has(version, "a", "z"))
        await until(lambda: run.sender.gauges()["num_fenced"] >= 1)
        await until(lambda: run.sender.gauges()["num_receivers"] == 2)
        for newer in (version + 1, version + 2):
            run.publish(newer)
            await until(lambda v=newer: run.has(v, "a", "z"))
        survivors = [*NAMES] if number is signal.SIGSTOP else ["a", "z"]
        if number is signal.SIGSTOP:
            psutil.Process(run.processes["victim"].pid).resume()
            await until(lambda: run.has(version + 2, "victim"))
        if backend == "shared" and number is signal.SIGSTOP:
            (failure,) = run.failures("victim")
            assert failure["version"] == version
            assert "overwritten the version before it was read" in failure["reason"]
        run.publish(version + 3)
        await until(lambda: run.has(version + 3, *survivors))
        if backend == "delta":
            differences = {name: [x["is_difference"] for x in run.loads(name)] for name in "az"}
            assert differences == {name: [False, *[True] * (version + 2)] for name in "az"}
        for name in survivors:
            lines = run.loads(name)
            assert all(line["is_right"] for line in lines)
            versions = [line["version"] for line in lines]
            assert versions == sorted(set(versions)), name


# Two beside each other, since most of each is a wait for a deadline.
@pytest.mark.parametrize("fates", [*zip(FATES[::2], FATES[1::2], strict=True)], ids=str)
async def test_whoever_dies_or_freezes_is_fenced_and_the_others_have_the_update(
    tmp_path: Path, fates: tuple[tuple[str, str, int], ...]
):
    await asyncio.gather(
        *(
            meet(tmp_path / f"{fate[1]}-{number}", *fate, number)
            for fate in fates
            for number in (signal.SIGKILL, signal.SIGSTOP)
        )
    )
