"""A sender and receivers of weights in the test's process, over real sockets and gloo groups."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import HeldEndpoint, LoadReport, Locality, SharedEndpoint, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.protocol import UNKNOWN_LOCALITY
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender import WeightSender
from streamrl.weights.transports.receive import TransferReceiver

SHAPES = {"embed": (50, 8), "head": (8, 50), "norm": (8,)}


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Generator:
    """A receiver that keeps what it loads."""

    def __init__(
        self,
        address: str,
        name: str,
        locality: Locality = UNKNOWN_LOCALITY,
        curve: Path | None = None,
        server: str = "",
    ) -> None:
        self.policy_version = 0
        self.updates: list[WeightUpdate] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = self.fails_to_share = False
        self.open = asyncio.Event()
        self.open.set()
        self.num_begun = 0
        self._transfer = TransferReceiver()
        self.receiver = WeightReceiver(
            address, name, self.load, locality=locality, curve=curve, server=server
        )

    async def load(self, update: WeightUpdate) -> LoadReport:
        self.num_begun += 1
        await self.open.wait()
        if self.fails:
            raise WeightTransferError("told to fail")
        if self.fails_to_share and isinstance(update.endpoint, SharedEndpoint):
            raise WeightTransferError("told not to share")
        if isinstance(update.endpoint, HeldEndpoint):
            self.policy_version = update.policy_version
            self.updates.append(update)
            return LoadReport(transfer_s=0.0, pause_s=0.0)
        received = await asyncio.to_thread(
            lambda: {name: tensor.clone() for name, tensor in self._transfer.tensors(update)}
        )
        self.weights = received
        self.policy_version = update.policy_version
        self.updates.append(update)
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    def has(self, value: float) -> bool:
        return self.weights.keys() == SHAPES.keys() and all(
            torch.equal(tensor, torch.full_like(tensor, value)) for tensor in self.weights.values()
        )


class Run:
    """A sender and its receivers, as tasks."""

    def __init__(
        self,
        tmp_path: Path,
        tasks: asyncio.TaskGroup,
        curve: Path | None = None,
        **settings: object,
    ) -> None:
        chosen = {"address": "tcp://127.0.0.1:0", "bucket_bytes": 600, "deadline_s": 60, **settings}
        layout = Layout(manifest_of(parameters(0.0)), int(str(chosen["bucket_bytes"])))
        self._tasks = tasks
        self._curve = curve
        self.sender = WeightSender(
            WeightSettings.model_validate(chosen), layout, torch.device("cpu"), tmp_path, curve
        )
        self.running = [tasks.create_task(self.sender.run())]

    def join(
        self, name: str, locality: Locality = UNKNOWN_LOCALITY, server: str = ""
    ) -> tuple[Generator, "asyncio.Task[None]"]:
        generator = Generator(self.sender.address, name, locality, self._curve, server)
        task = self._tasks.create_task(generator.receiver.run())
        self.running.append(task)
        return generator, task

    def publish(self, version: int, value: float) -> None:
        self.sender.snapshot(parameters(value), version)
        self.sender.publish()


@contextlib.asynccontextmanager
async def run(tmp_path: Path, curve: Path | None = None, **settings: object) -> AsyncIterator[Run]:
    async with asyncio.TaskGroup() as tasks:
        started = Run(tmp_path, tasks, curve, **settings)
        try:
            yield started
        finally:
            for task in started.running:
                task.cancel()
            await asyncio.wait(started.running)
            # Also after a failure: a context that is collected with an open socket blocks for good.
            started.sender.close()
